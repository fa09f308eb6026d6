/* The first and only process of an emulated machine: runs /check and says how it ended. See tools/emulate_x86.py,
 * which defines N_ROUNDS. */
#include <stddef.h>
#include <stdio.h>
#include <sys/reboot.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void) {
    int status = 1;
    pid_t child = fork();
    if (child == 0) {
        execl("/check", "/check", N_ROUNDS, (char *)NULL);
        _exit(127);
    }
    waitpid(child, &status, 0);
    printf("check ended: %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    fflush(stdout);
    sleep(1); /* for the serial port */
    reboot(RB_POWER_OFF);
    for (;;) pause();
}
