/* shim/code/image.c and the code that it calls: a program image in a file. */
#include "code/image.h"
#include "fuzz.h"

#define PATH "/image"
#define MOST (1 << 20)

static void *file;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    file = file_make(PATH, MOST);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    size = size < MOST ? size : MOST;
    file_resize(PATH, size);
    if (size)
        memcpy(file, data, size);
    struct gs_image once = gs_image_read_file(PATH, 86), again = gs_image_read_file(PATH, 86);
    require(once.data == again.data && once.code == again.code);
    return 0;
}
