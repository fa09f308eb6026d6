/* Reset. The vector unit is switched on before anything else: the compiler may use it to clear memory. */
#include "board.h"

#include <stdint.h>

extern uint32_t bss_begin[], bss_end[], data_begin[], data_end[], data_load[], stack_top[];
int main(void);
void systick_handler(void);
void uart_handler(void);

static void hang(void) {
    for (;;) {}
}

__attribute__((used)) static void begin(void) {
    for (uint32_t *to = data_begin, *from = data_load; to < data_end;) *to++ = *from++;
    for (uint32_t *to = bss_begin; to < bss_end;) *to++ = 0;
    main();
}

void reset_handler(void);

__attribute__((naked, used)) void reset_handler(void) {
    __asm volatile("movw r0, #0xED88\n"
                   "movt r0, #0xE000\n" /* CPACR */
                   "ldr r1, [r0]\n"
                   "orr r1, r1, #0xF00000\n"
                   "str r1, [r0]\n"
                   "dsb\n"
                   "isb\n"
                   "b begin\n");
}

#define TIMES_8(entry) entry, entry, entry, entry, entry, entry, entry, entry

__attribute__((section(".vectors"), used)) static void (*const vectors[16 + 48])(void) = {
    (void (*)(void))stack_top, reset_handler, hang, hang, hang, hang, hang, hang,
    hang, hang, hang, hang, hang, hang, hang, systick_handler,
    /* no interrupt but the UART's is switched on */
    TIMES_8(uart_handler), TIMES_8(uart_handler), TIMES_8(uart_handler),
    TIMES_8(uart_handler), TIMES_8(uart_handler), TIMES_8(uart_handler),
};
