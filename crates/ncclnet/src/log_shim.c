/* The logger for plugins: printf-style, hence C. Formats into a buffer on the stack and passes
 * the text to Rust. Called from any thread of the plugin, at any time, also after the library
 * that owns it has been abandoned. */

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#define HIDDEN __attribute__((visibility("hidden")))

/* Longer lines are cut: a plugin's line is a message, not a payload. */
enum { LINE_BYTES = 1024 };

typedef int (*wanted_fn)(int level);
typedef void (*sink_fn)(int level, unsigned long flags, const char *file, int line,
                        const char *text, size_t length);

/* Written once, before the first plugin gets the logger. */
static wanted_fn wanted;
static sink_fn sink;

HIDDEN void tcpx_ncclnet_log_install(wanted_fn wanted_by_rust, sink_fn sink_in_rust) {
  wanted = wanted_by_rust;
  sink = sink_in_rust;
}

HIDDEN __attribute__((format(printf, 5, 6))) void tcpx_ncclnet_log(int level, unsigned long flags,
                                                                   const char *file, int line,
                                                                   const char *fmt, ...) {
  /* Plugins log first and read errno afterwards. */
  int saved_errno = errno;
  if (fmt != NULL && wanted(level)) {
    char text[LINE_BYTES];
    va_list arguments;
    va_start(arguments, fmt);
    int length = vsnprintf(text, sizeof text, fmt, arguments);
    va_end(arguments);
    if (length > 0) {
      size_t kept = (size_t)length < sizeof text ? (size_t)length : sizeof text - 1;
      sink(level, flags, file, line, text, kept);
    }
  }
  errno = saved_errno;
}
