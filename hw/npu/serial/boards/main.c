/* The firmware on a board with CMSDK UART 0: bytes in and out by interrupt, time from SysTick, one loop. board.h has the
 * addresses. */
#include "board.h"
#include "device.h"

#include <string.h>

#define REGISTER(address) (*(volatile uint32_t *)(uintptr_t)(address))
#define UART_DATA REGISTER(BOARD_UART)
#define UART_STATE REGISTER(BOARD_UART + 4)
#define UART_CTRL REGISTER(BOARD_UART + 8)
#define UART_INTERRUPTS REGISTER(BOARD_UART + 12)
#define UART_BAUDDIV REGISTER(BOARD_UART + 16)
#define SYST_CSR REGISTER(0xE000E010)
#define SYST_RVR REGISTER(0xE000E014)
#define SYST_CVR REGISTER(0xE000E018)
#define ICSR REGISTER(0xE000ED04)
#define NVIC_ISER(n) REGISTER(0xE000E100 + 4 * ((n) / 32))
#define DEMCR REGISTER(0xE000EDFC)
#define DWT_CTRL REGISTER(0xE0001000)
#define DWT_CYCCNT REGISTER(0xE0001004)

enum { TX_FULL = 1, RX_FULL = 2, TX_ENABLE = 1, RX_ENABLE = 2, TX_INTERRUPT = 4, RX_INTERRUPT = 8 };
enum { RX_RING = 65536, TX_RING = 16384, TX_AHEAD = 2048 };

static uint8_t rx_ring[RX_RING], tx_ring[TX_RING + FRAME_MAX];
static volatile uint32_t rx_head, tx_head; /* moved by the interrupt that puts or sends */
static volatile uint32_t rx_tail, tx_tail;
static volatile uint32_t n_wraps;
static device self;
static uint8_t out[TX_AHEAD + FRAME_MAX];

static uint8_t model_memory[BOARD_MODEL_BYTES] __attribute__((section(".large"), aligned(64)));
static int8_t arena_memory[BOARD_ARENA_BYTES] __attribute__((section(".large"), aligned(64)));

enum { RELOAD = BOARD_CLOCK_HZ / 10 };

void systick_handler(void) { n_wraps++; }

/* Puts the line's bytes into the ring; what does not fit is lost, and the link sees it. */
void uart_handler(void) {
    UART_INTERRUPTS = 0xF;
    while (UART_STATE & RX_FULL) {
        uint8_t byte = (uint8_t)UART_DATA;
        if (rx_head - rx_tail < RX_RING) {
            rx_ring[rx_head % RX_RING] = byte;
            rx_head++;
        }
    }
    while (tx_tail != tx_head && !(UART_STATE & TX_FULL)) {
        UART_DATA = tx_ring[tx_tail % TX_RING];
        tx_tail++;
    }
}

static int64_t now_us(void) {
    uint32_t wraps, left;
    do {
        wraps = n_wraps;
        left = SYST_CVR;
    } while (wraps != n_wraps);
    return (int64_t)wraps * 100000 + (RELOAD - 1 - left) / (BOARD_CLOCK_HZ / 1000000);
}

static void interrupts(int on) {
    if (on) __asm volatile("cpsie i" ::: "memory");
    else __asm volatile("cpsid i" ::: "memory");
}

static void move(void) {
    static int64_t woken_us;
    uint32_t head = rx_head, n_queued = tx_head - tx_tail;
    int64_t at_us = now_us();
    if (head == rx_tail && at_us - woken_us < 1000) return;
    woken_us = at_us;
    do {
        uint32_t first = rx_tail % RX_RING, n = head - rx_tail;
        if (n > RX_RING - first) n = RX_RING - first;
        device_receive(&self, rx_ring + first, n);
        rx_tail += n;
    } while (head != rx_tail);
    if (n_queued >= TX_AHEAD) return;
    size_t n = device_transmit(&self, out, TX_AHEAD - n_queued);
    for (size_t i = 0; i < n; i++) tx_ring[(tx_head + i) % TX_RING] = out[i];
    interrupts(0);
    tx_head += (uint32_t)n;
    uart_handler(); /* the first byte; interrupts send the others */
    interrupts(1);
}

/* A chip counts its cycles; QEMU's does not. Where the counter stands still, the answer is the careful one. */
static int is_emulated(void) {
    DEMCR |= 1u << 24;
    DWT_CTRL |= 1;
    uint32_t before = DWT_CYCCNT;
    for (volatile int i = 0; i < 1000; i++) {}
    return DWT_CYCCNT == before;
}

int main(void) {
    static device_board board;
    SYST_RVR = RELOAD - 1;
    SYST_CVR = 0;
    SYST_CSR = 7;
    board.chip = BOARD_CHIP;
    board.is_emulated = is_emulated();
    board.model = model_memory;
    board.max_model_bytes = sizeof model_memory;
    board.arena = arena_memory;
    board.arena_bytes = sizeof arena_memory;
    board.now_us = now_us;
    board.move = move;
    device_init(&self, &board);
    UART_BAUDDIV = BOARD_CLOCK_HZ / BOARD_BAUD;
    UART_CTRL = TX_ENABLE | RX_ENABLE | TX_INTERRUPT | RX_INTERRUPT;
    NVIC_ISER(BOARD_UART_RX_IRQ) = 1u << (BOARD_UART_RX_IRQ % 32);
    NVIC_ISER(BOARD_UART_TX_IRQ) = 1u << (BOARD_UART_TX_IRQ % 32);
    interrupts(1);
    for (;;) {
        move();
        device_work(&self);
        if (!self.is_answering && rx_head == rx_tail) __asm volatile("wfi"); /* SysTick wakes it too */
    }
}
