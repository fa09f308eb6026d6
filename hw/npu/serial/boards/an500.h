/* MPS2 with the AN500 image: Cortex-M7, 25 MHz. */
#define BOARD_CHIP "Cortex-M7, MPS2 AN500"
#define BOARD_UART 0x40004000u
#define BOARD_UART_RX_IRQ 0
#define BOARD_UART_TX_IRQ 1
#define BOARD_CLOCK_HZ 25000000
#define BOARD_BAUD 921600
#define BOARD_MODEL_BYTES (4u << 20)
#define BOARD_ARENA_BYTES (11u << 20)
