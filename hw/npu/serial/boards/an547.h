/* MPS3 with the AN547 image: Cortex-M55 in an SSE-300, 32 MHz, everything by its secure alias. */
#define BOARD_CHIP "Cortex-M55, MPS3 AN547"
#define BOARD_UART 0x59303000u
#define BOARD_UART_RX_IRQ 33
#define BOARD_UART_TX_IRQ 34
#define BOARD_CLOCK_HZ 32000000
#define BOARD_BAUD 921600
#define BOARD_MODEL_BYTES (4u << 20)
#define BOARD_ARENA_BYTES (12u << 20)
