#include "belayer.h"

#include <stdio.h>
#include <string.h>

int main(int argc, char **argv) {
    const char *role = argc > 1 ? argv[1] : "";
    if (!strcmp(role, "init")) return init_main();
    if (!strcmp(role, "park")) return park_main(argc - 1, argv + 1);
    if (!strcmp(role, "keeper")) return keeper_main(argc - 1, argv + 1);
    if (!strcmp(role, "tree")) return tree_main(argc - 1, argv + 1);
    if (!strcmp(role, "guest")) return guest_main();
    if (!strcmp(role, "gate")) return gate_main(argc - 1, argv + 1);
    fprintf(stderr, "belayer-sandbox: keeper | park | tree | init | guest | gate\n");
    return 64;
}
