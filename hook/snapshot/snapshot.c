/* CPython that writes its own memory as a program, and continues when that program starts.
 *
 *     python BOOT LIBRARY ORDER FILE     runs BOOT with Python's modules in LIBRARY; writes FILE
 *     FILE [ARGUMENT]...                 calls BOOT's `resume` with its arguments and environment
 *
 * Python's memory is the section "python", with the variables of all objects except the C
 * library's, and the pool (below). FILE is this program with the contents of both. The C library
 * starts as in any program: with functions for this processor, its own stack canary, pointer guard,
 * vDSO, thread pointer and program break. For Python this is like the return from a fork. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <internal/pycore_runtime.h>

#include <elf.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/statfs.h>

#define PAGE ((size_t)1 << 16) /* the largest of all processors that Python is built for */
PyObject *PyInit__json(void), *PyInit_mmap(void), *PyInit__ctypes(void);

extern const char __ehdr_start[]; /* defined by the linker */
extern char __start_python[], __stop_python[];

static PyObject *resume; /* defined by BOOT; NULL until it has run */
static PyThreadState *thread;

static void fail(const char *what) {
    perror(what);
    _exit(1);
}

/* Memory for Python and the C library, from a pool at a fixed address, which is a segment of the
 * snapshot. Blocks begin 8 bytes before a multiple of 16; up to 1 KiB they are multiples of 16
 * bytes, above it there are four sizes for each power of two. A large block is its own mapping
 * until it is freed, since RLIMIT_AS counts addresses. Python has one thread. A start writes to a
 * tenth of its objects, and the kernel copies each page that is written to. So these come first:
 * ORDER lists the numbers of their blocks, by tools/train.py, with one block a page (SPACING). */

#define HEADER sizeof(size_t)
#define CHUNK ((size_t)1 << 18)
#define POOL ((char *)0x10000000)
#define POOL_SIZE ((size_t)(SPACING > 1 ? 2000 : 32) << 20)
#define AREA ((size_t)3 << 18) /* for blocks of ORDER, whose top two bits choose one of four */
#define BLOCK_OF(memory) ((struct block *)((char *)(memory)-HEADER))
#define FINE 64 /* number of block kinds with 16, 32, ... 1024 bytes */

struct block {
    uint32_t kind, number;
    struct block *next; /* of the free list; else the caller's data */
};

static char *next, *end, *areas[4];
static uint32_t number;
static const uint32_t *order;
static struct block *unused[FINE + 4 * 54];

static char *map(void *address, size_t size, int flags) {
    flags |= MAP_PRIVATE | MAP_ANONYMOUS;
    char *got = mmap(address, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    return got == MAP_FAILED ? NULL : got + HEADER;
}

static bool begin_pool(int order_file) {
    next = map(POOL, POOL_SIZE, MAP_FIXED_NOREPLACE);
    for (size_t i = 0; next && i < 4; i++, next += AREA)
        areas[i] = next;
    end = POOL + POOL_SIZE;
    memset(unused, 0, sizeof unused);
    number = 0;
    order = mmap(NULL, AREA, PROT_READ, MAP_PRIVATE, order_file, 0);
    return next && order != MAP_FAILED;
}

static void *allocate_raw(void *context, size_t size) {
    char *found = next;
    (void)context;
    if (size > CHUNK / 2 && (resume || size > (size_t)(end - next)))
        return map(NULL, size + HEADER, 0);
    if (size > (size_t)(end - next)) {
        if (!(found = map(NULL, CHUNK, 0)))
            return NULL;
        end = found - HEADER + CHUNK;
    }
    next = found + size;
    return found;
}

static void keep_raw(void *context, void *memory, size_t size) {
    (void)context, (void)memory, (void)size;
}

/* Return the bytes of a block that the caller can use. */
static size_t room_of(size_t kind) {
    size_t size = kind <= FINE ? 16 * kind : ((kind - 1) % 4 + 5) << ((kind - FINE - 1) / 4 + 8);
    return size - HEADER;
}

/* Return the smallest kind with room for `size`. */
static size_t kind_of(size_t size) {
    size_t last = (size + HEADER - 1) | 15;
    if (last < 16 * FINE)
        return last / 16 + 1;
    size_t top = 63 - (size_t)__builtin_clzl(last);
    return FINE + 4 * (top - 10) + (last >> (top - 2)) - 3;
}

void *malloc(size_t size) {
    size_t kind = kind_of(size), whole = (room_of(kind) + HEADER + SPACING - 1) & -(size_t)SPACING;
    struct block *block = NULL;
    char **area = order && *order << 2 >> 2 == number ? &areas[*order++ >> 30] : NULL;
    if (area && *area + whole <= POOL + (area - areas + 1) * (ptrdiff_t)AREA) {
        block = (struct block *)*area;
        *area += whole;
    } else if (size < PTRDIFF_MAX / 2 && (block = unused[kind]))
        unused[kind] = block->next;
    else if (size < PTRDIFF_MAX / 2)
        block = allocate_raw(NULL, whole);
    if (!block)
        return errno = ENOMEM, NULL;
    block->kind = (uint32_t)kind;
    if (!resume)
        block->number = number++;
    return (char *)block + HEADER;
}

void free(void *memory) {
    if (!memory)
        return;
    struct block *block = BLOCK_OF(memory);
    size_t room = room_of(block->kind);
    if (!resume) /* so that each snapshot has the same bytes, and none of this machine's data */
        memset(memory, 0, room);
    if (room > CHUNK / 2 && (char *)memory > POOL + POOL_SIZE)
        munmap((char *)block - HEADER, room + 2 * HEADER);
    else
        block->next = unused[block->kind], unused[block->kind] = block;
}

void *calloc(size_t count, size_t size) {
    size_t bytes;
    void *memory = malloc(__builtin_mul_overflow(count, size, &bytes) ? SIZE_MAX : bytes);
    return memory ? memset(memory, 0, bytes) : NULL;
}

void *realloc(void *memory, size_t size) {
    size_t room = memory ? room_of(BLOCK_OF(memory)->kind) : 0;
    if (memory && size <= room && (room <= CHUNK / 2 || size > room / 2))
        return memory;
    void *moved = malloc(size);
    if (moved && memory) {
        memcpy(moved, memory, size < room ? size : room);
        free(memory);
    }
    return moved;
}

/* For what Python imports before BOOT: a varying number, such as a time, makes other objects. */
int stat(const char *path, struct stat *found) {
    int code = fstatat(AT_FDCWD, path, found, 0);
    if (!resume && code == 0)
        *found = (struct stat){
            .st_mode = found->st_mode, .st_size = found->st_size, .st_mtime = found->st_mtime};
    return code;
}

static void write_at(int file, const void *from, size_t size, size_t at) {
    if (pwrite(file, from, size, (off_t)at) != (ssize_t)size)
        fail("write");
}

static void write_snapshot(const char *path) {
    const Elf64_Ehdr *head = (const void *)__ehdr_start;
    Elf64_Phdr segments[16], *spare = segments, *variables = segments;
    int file = open(path, O_RDWR | O_CLOEXEC);
    off_t size = lseek(file, 0, SEEK_END);
    memcpy(segments, __ehdr_start + head->e_phoff, sizeof *segments * head->e_phnum);
    while (variables->p_type != PT_LOAD || !(variables->p_flags & PF_W))
        variables++;
    while (spare->p_type != PT_NOTE) /* no program reads it: its header becomes the pool's */
        spare++;
    size_t at = ((size_t)size + PAGE - 1) & ~(PAGE - 1), used = (size_t)(next - POOL);
    next = areas[0], end = POOL + AREA;
    memset(unused, 0, sizeof unused); /* new objects side by side: fewer pages are copied */
    order = NULL;
    uintptr_t pool = (uintptr_t)POOL;
    *spare = (Elf64_Phdr){PT_LOAD, PF_R | PF_W, at, pool, pool, used, used, PAGE};
    write_at(file, segments, sizeof *segments * head->e_phnum, head->e_phoff);
    write_at(file, __start_python, (size_t)(__stop_python - __start_python),
             variables->p_offset + ((uintptr_t)__start_python - variables->p_vaddr));
    write_at(file, POOL, used, at);
}

static void become_this_process(void) {
    Py_tss_t *key = &_PyRuntime.gilstate.autoTSSkey; /* unknown to this start's C library */
    key->_is_initialized = 0;
    if (PyThread_tss_create(key) != 0 || PyThread_tss_set(key, thread) != 0)
        fail("thread-specific data");
    thread->thread_id = PyThread_get_thread_ident();
    thread->native_thread_id = PyThread_get_thread_native_id();
    PyOS_AfterFork_Child();
}

static void resume_python(int count, char **argv) {
    if (SPACING > 1) /* do not read ahead pages that are not touched */
        madvise(POOL, POOL_SIZE, MADV_RANDOM);
    become_this_process();
    PyObject *words = PyList_New(count), *variables = PyDict_New();
    for (int i = 0; words && i < count; i++)
        PyList_SET_ITEM(words, i, PyUnicode_DecodeFSDefault(argv[i]));
    for (char **one = environ; variables && *one; one++) { /* the first of a name counts */
        const char *equals = **one == '=' ? NULL : strchr(*one, '=');
        PyObject *name = equals ? PyBytes_FromStringAndSize(*one, equals - *one) : NULL;
        PyObject *value = name ? PyBytes_FromString(equals + 1) : NULL;
        if (value && !PyDict_SetDefault(variables, name, value))
            break;
    }
    PyObject *ignored = PyList_New(0);
    for (int number = 1; ignored && number < NSIG; number++) {
        struct sigaction action;
        if (sigaction(number, NULL, &action) == 0 && action.sa_handler == SIG_IGN)
            PyList_Append(ignored, PyLong_FromLong(number));
    }
    PyObject *code = PyObject_CallFunctionObjArgs(resume, words, variables, ignored, NULL);
    if (!code)
        PyErr_Print();
    if (SPACING > 1)
        raise(SIGSTOP); /* for tools/train.py */
    _exit(code ? (int)PyLong_AsLong(code) : 1);
}

static void check(PyStatus status) {
    if (PyStatus_Exception(status))
        Py_ExitStatusException(status);
}

/* Use nothing of the host or of the environment. The hash seed is fixed: strings keep hashes. */
static void start_python(const char *library) {
    PyPreConfig before;
    PyConfig config;
    PyPreConfig_InitIsolatedConfig(&before);
    before.utf8_mode = 1;
    before.allocator = PYMEM_ALLOCATOR_MALLOC;
    check(Py_PreInitialize(&before));
    PyImport_AppendInittab("_json", PyInit__json);
    PyImport_AppendInittab("_ctypes", PyInit__ctypes);
    PyImport_AppendInittab("mmap", PyInit_mmap);
    PyConfig_InitIsolatedConfig(&config);
    config.code_debug_ranges = config.install_signal_handlers = config.site_import = 0;
    config.write_bytecode = config.pathconfig_warnings = 0;
    config.use_hash_seed = config.module_search_paths_set = 1;
    wchar_t *path = Py_DecodeLocale(library, NULL);
    /* Set, so that Python searches no directory for them. */
    wchar_t **given[] = {&config.executable,  &config.base_executable,  &config.prefix,
                         &config.exec_prefix, &config.base_exec_prefix, &config.base_prefix};
    for (size_t i = 0; i < sizeof given / sizeof *given; i++)
        check(PyConfig_SetString(&config, given[i], i < 2 ? L"/snapshot" : L"/"));
    check(PyConfig_SetString(&config, &config.stdlib_dir, path));
    check(PyWideStringList_Append(&config.module_search_paths, path));
    check(Py_InitializeFromConfig(&config));
    PyConfig_Clear(&config);
}

int main(int count, char **argv) {
    if (resume)
        resume_python(count, argv);
    close_range(3, ~0U, 0); /* so that descriptors have the same numbers each time */
    if (!begin_pool(open(argv[3], O_RDONLY)))
        fail(argv[3]);
    PyObjectArenaAllocator arenas = {NULL, allocate_raw, keep_raw};
    PyObject_SetArenaAllocator(&arenas);
    start_python(argv[2]);
    FILE *boot = fopen(argv[1], "r");
    PyObject *main_module = PyImport_AddModule("__main__");
    /* gpushare/system/syscalls.py looks these up as it is imported, and fails if one is missing. A
     * static program cannot look up symbols. */
    PyObject *functions =
        Py_BuildValue("{sKsKsKsKsKsKsKsK}", "connect", connect, "fallocate", fallocate, "fstatfs",
                      fstatfs, "setns", setns, "socket", socket, "syscall", syscall, "umount2",
                      umount2, "unshare", unshare);
    if (!boot || PyModule_AddObject(main_module, "FUNCTIONS", functions) != 0 ||
        PyRun_SimpleFileEx(boot, argv[1], 1) != 0)
        _exit(1);
    resume = PyObject_GetAttrString(main_module, "resume");
    thread = PyThreadState_Get();
    thread->thread_id = thread->native_thread_id = _PyRuntime.main_thread = 0;
    write_snapshot(argv[4]);
    _exit(0);
}
