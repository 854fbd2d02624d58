// Preloaded into Wine's server, on Linux, so that it binds UDP sockets to their addresses. Otherwise
// it binds them to 0.0.0.0 and perhaps to an interface (bind_to_interface in its server/sock.c), and
// two Services could not have one port.
#include <errno.h>

int getifaddrs(void **list) {
  (void)list;
  errno = ENOSYS;
  return -1;
}
