/* Preloaded, makes each sync of a file take SLOW_SYNC_US microseconds longer, as on a cheap disk.
   The real call is made first: nothing is faked but the time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

static int delayed(const char *name, int descriptor) {
  int (*call)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
  int result = call(descriptor);
  const char *text = getenv("SLOW_SYNC_US");
  usleep(text ? (useconds_t)atoi(text) : 0);
  return result;
}

int fsync(int descriptor) { return delayed("fsync", descriptor); }
int fdatasync(int descriptor) { return delayed("fdatasync", descriptor); }
