/* Ends an example with the library's message when a call fails. */
#ifndef EXAMPLES_CHECK_H
#define EXAMPLES_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#include "tcpx_p2p.h"

#define OK(call)                                                                                  \
    do {                                                                                          \
        tcpx_status status_ = (call);                                                             \
        if (status_ != TCPX_OK) {                                                                 \
            fprintf(stderr, "%s: %s: %s\n", #call, tcpx_status_name(status_), tcpx_last_error()); \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

/* Returns a session with the settings of the environment and a name. */
static inline tcpx_session *start_session(const char *name)
{
    tcpx_config *config;
    tcpx_session *session;
    OK(tcpx_config_from_env(&config));
    OK(tcpx_config_set(config, "name", name));
    OK(tcpx_session_new(config, &session));
    tcpx_config_free(config);
    return session;
}

#endif
