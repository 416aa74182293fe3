/* A library for LD_PRELOAD that counts calls, by the role of their process and their class, and makes one of them fail.

   The file that NTH_FILE names is mapped by every process that has the library; nth_failure.py writes and reads it.
   A call is counted while `armed` is set; the one whose number is `nth`, of `role` and `class`, fails with `error`.
   A process that was forked and has not called exec is not counted. See ld.so(8). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, LAUNCHER, ENGINE, API, POOL, ROLES };
enum { ALLOCATION, OPEN, SEND, START, THREAD, CLASSES };
enum { LARGE_MALLOC = 16 << 10, LARGE_MMAP = 64 << 10 }; /* bytes from which on allocations are counted */

struct shared { /* the layout is known to nth_failure.py */
  _Atomic int64_t armed, role, class, nth, error, failed, pid;
  _Atomic int64_t hits[ROLES][CLASSES];
  char where[512]; /* function and library of the call that failed, and its size */
};

static struct shared *shared;
static int role;
static __thread int retry_fails; /* what subprocess tries when vfork fails must fail with it */

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static void forget(void) { role = NONE; }

static int role_of(const char *words, ssize_t size) {
  static const struct { const char *words; size_t size; int role; } known[] = {
      {"\0ferrule.launch.child\0engine", 28, ENGINE},
      {"\0ferrule.launch.child\0api", 25, API},
      {"\0ferrule.frontend.children.child", 32, POOL},
      {"\0ferrule\0serve", 14, LAUNCHER},
  };
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (size > 0 && memmem(words, size, known[i].words, known[i].size)) return known[i].role;
  return NONE;
}

__attribute__((constructor)) static void begin(void) {
  static char words[4096];
  const char *path = getenv("NTH_FILE");
  if (!path) return;
  int fd = syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  ssize_t size = syscall(SYS_read, fd, words, sizeof words);
  syscall(SYS_close, fd);
  int found = role_of(words, size);
  if (!found) return;
  fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  void *memory = (void *)syscall(SYS_mmap, NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  syscall(SYS_close, fd);
  if (memory == MAP_FAILED) return;
  shared = memory;
  pthread_atfork(NULL, NULL, forget);
  role = found;
}

/* The Python stack of this thread, to the file beside the mapped one, where the interpreter offers it. */
static void tell_stack(void) {
  void *(*state)(void) = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
  void (*dump)(int, void *) = (void (*)(int, void *))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
  const char *path = getenv("NTH_STACK");
  void *thread = state && dump && path ? state() : NULL;
  if (!thread) return;
  int fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  dump(fd, thread);
  syscall(SYS_close, fd);
}

/* Count a call. Returns the error that it must fail with, or 0. */
static int fails(int class, const char *name, size_t size, void *caller) {
  if (!role || !atomic_load(&shared->armed)) return 0;
  int64_t hit = atomic_fetch_add(&shared->hits[role][class], 1) + 1;
  if (role != atomic_load(&shared->role) || class != atomic_load(&shared->class) || hit != atomic_load(&shared->nth))
    return 0;
  Dl_info info;
  const char *library = dladdr(caller, &info) && info.dli_fname ? info.dli_fname : "?";
  const char *last = strrchr(library, '/');
  snprintf(shared->where, sizeof shared->where, "%s(%zu) from %s", name, size, last ? last + 1 : library);
  atomic_store(&shared->pid, getpid());
  tell_stack();
  atomic_store(&shared->failed, 1);
  return (int)atomic_load(&shared->error);
}

#define CALLER __builtin_return_address(0)
#define FAIL(class, size, result)                                    \
  do {                                                               \
    int error_ = fails(class, __func__, (size_t)(size), CALLER);     \
    if (error_) {                                                    \
      errno = error_;                                                \
      return result;                                                 \
    }                                                                \
  } while (0)
#define REAL(name) ((__typeof__(&name))next(#name))

static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

/* ------------------------------------------------------------------------------------------ allocation */

void *malloc(size_t size) {
  if (size >= LARGE_MALLOC) FAIL(ALLOCATION, size, NULL);
  return __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
  size_t whole;
  if (!__builtin_mul_overflow(count, size, &whole) && whole >= LARGE_MALLOC) FAIL(ALLOCATION, whole, NULL);
  return __libc_calloc(count, size);
}

void *realloc(void *memory, size_t size) {
  if (size >= LARGE_MALLOC) FAIL(ALLOCATION, size, NULL);
  return __libc_realloc(memory, size);
}

int posix_memalign(void **memory, size_t alignment, size_t size) {
  int error = size >= LARGE_MALLOC ? fails(ALLOCATION, __func__, size, CALLER) : 0;
  if (error) return error;
  void *found = __libc_memalign(alignment, size);
  if (!found) return ENOMEM;
  *memory = found;
  return 0;
}

void *aligned_alloc(size_t alignment, size_t size) {
  if (size >= LARGE_MALLOC) FAIL(ALLOCATION, size, NULL);
  return __libc_memalign(alignment, size);
}

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
  if (size >= LARGE_MMAP) FAIL(ALLOCATION, size, MAP_FAILED);
  return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
}

void *mmap64(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
  if (size >= LARGE_MMAP) FAIL(ALLOCATION, size, MAP_FAILED);
  return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
}

/* ------------------------------------------------------------------------------------------ descriptors */

static mode_t mode_of(int flags, va_list rest) {
  return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;
}

#define OPENS(name, before, folder)                              \
  int name(before const char *path, int flags, ...) {            \
    va_list rest;                                                \
    va_start(rest, flags);                                       \
    mode_t mode = mode_of(flags, rest);                          \
    va_end(rest);                                                \
    FAIL(OPEN, 0, -1);                                           \
    return syscall(SYS_openat, folder, path, flags, mode);       \
  }
#define NOTHING
#define FOLDER int folder,
OPENS(open, NOTHING, AT_FDCWD)
OPENS(open64, NOTHING, AT_FDCWD)
OPENS(openat, FOLDER, folder)
OPENS(openat64, FOLDER, folder)

/* What calls with checks become, in programs that were compiled with _FORTIFY_SOURCE. */
int __open_2(const char *path, int flags) {
  FAIL(OPEN, 0, -1);
  return syscall(SYS_openat, AT_FDCWD, path, flags, 0);
}

int __open64_2(const char *path, int flags) {
  FAIL(OPEN, 0, -1);
  return syscall(SYS_openat, AT_FDCWD, path, flags, 0);
}

FILE *fopen(const char *path, const char *mode) {
  FAIL(OPEN, 0, NULL);
  return REAL(fopen)(path, mode);
}

FILE *fopen64(const char *path, const char *mode) {
  FAIL(OPEN, 0, NULL);
  return REAL(fopen64)(path, mode);
}

/* An error of a device cannot come from these: none but EMFILE is likely. */
#define DESCRIPTOR                                     \
  do {                                                 \
    if (fails(OPEN, __func__, 0, CALLER)) {            \
      errno = EMFILE;                                  \
      return -1;                                       \
    }                                                  \
  } while (0)

int socket(int domain, int type, int protocol) {
  DESCRIPTOR;
  return syscall(SYS_socket, domain, type, protocol);
}

int socketpair(int domain, int type, int protocol, int ends[2]) {
  DESCRIPTOR;
  return syscall(SYS_socketpair, domain, type, protocol, ends);
}

int accept4(int fd, __SOCKADDR_ARG address, socklen_t *size, int flags) {
  DESCRIPTOR;
  return REAL(accept4)(fd, address, size, flags);
}

int pipe(int ends[2]) {
  DESCRIPTOR;
  return syscall(SYS_pipe2, ends, 0);
}

int pipe2(int ends[2], int flags) {
  DESCRIPTOR;
  return syscall(SYS_pipe2, ends, flags);
}

int eventfd(unsigned int value, int flags) {
  DESCRIPTOR;
  return syscall(SYS_eventfd2, value, flags);
}

int epoll_create1(int flags) {
  DESCRIPTOR;
  return syscall(SYS_epoll_create1, flags);
}

/* ------------------------------------------------------------------------------------------ sockets */

static int is_socket(int fd) {
  struct stat found;
  return role && atomic_load(&shared->armed) && fstat(fd, &found) == 0 && S_ISSOCK(found.st_mode);
}

ssize_t send(int fd, const void *bytes, size_t size, int flags) {
  FAIL(SEND, size, -1);
  return REAL(send)(fd, bytes, size, flags);
}

ssize_t sendto(int fd, const void *bytes, size_t size, int flags, __CONST_SOCKADDR_ARG to, socklen_t length) {
  FAIL(SEND, size, -1);
  return REAL(sendto)(fd, bytes, size, flags, to, length);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
  FAIL(SEND, 0, -1);
  return REAL(sendmsg)(fd, message, flags);
}

ssize_t write(int fd, const void *bytes, size_t size) {
  if (is_socket(fd)) FAIL(SEND, size, -1);
  return REAL(write)(fd, bytes, size);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
  if (is_socket(fd)) FAIL(SEND, 0, -1);
  return REAL(writev)(fd, parts, count);
}

/* ------------------------------------------------------------------------------------------ processes, threads */

pid_t fork(void) {
  if (retry_fails) {
    retry_fails = 0;
    errno = EAGAIN;
    return -1;
  }
  FAIL(START, 0, -1);
  return REAL(fork)();
}

/* A function that returns twice on one stack cannot wrap the real one: fork does the same, and takes longer. */
pid_t vfork(void) {
  int error = fails(START, __func__, 0, CALLER);
  if (error) {
    retry_fails = 1;
    errno = error;
    return -1;
  }
  return REAL(fork)();
}

int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *how,
                char *const words[], char *const variables[]) {
  int error = fails(START, __func__, 0, CALLER);
  return error ? error : REAL(posix_spawn)(pid, path, actions, how, words, variables);
}

int posix_spawnp(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *how,
                 char *const words[], char *const variables[]) {
  int error = fails(START, __func__, 0, CALLER);
  return error ? error : REAL(posix_spawnp)(pid, path, actions, how, words, variables);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*work)(void *), void *argument) {
  int error = fails(THREAD, __func__, 0, CALLER);
  return error ? error : REAL(pthread_create)(thread, how, work, argument);
}
