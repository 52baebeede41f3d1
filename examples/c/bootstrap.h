/*
 * A socket that exchanges a few hundred bytes, in place of an application's own means (etcd, a
 * scheduler, HTTP). Every message is its length in four bytes, then its content.
 */
#ifndef EXAMPLES_BOOTSTRAP_H
#define EXAMPLES_BOOTSTRAP_H

#include <arpa/inet.h>
#include <netdb.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static inline void bootstrap_die(const char *what)
{
    perror(what);
    exit(1);
}

static inline void bootstrap_resolve(const char *host, const char *port, struct addrinfo **found)
{
    struct addrinfo hints;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(host, port, &hints, found) != 0) {
        fprintf(stderr, "cannot resolve %s:%s\n", host, port);
        exit(1);
    }
}

/* Waits for one client. Port 0 takes a free one; prints the port. */
static inline int bootstrap_serve(const char *host, const char *port)
{
    struct addrinfo *address;
    bootstrap_resolve(host, port, &address);
    int on = 1, listener = socket(address->ai_family, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, address->ai_addr, address->ai_addrlen) != 0 || listen(listener, 1) != 0) {
        bootstrap_die("listen");
    }
    freeaddrinfo(address);

    struct sockaddr_storage bound;
    socklen_t length = sizeof bound;
    char number[16];
    if (getsockname(listener, (struct sockaddr *)&bound, &length) != 0 ||
        getnameinfo((struct sockaddr *)&bound, length, NULL, 0, number, sizeof number, NI_NUMERICSERV) != 0) {
        bootstrap_die("getsockname");
    }
    printf("server: listening on port %s\n", number);
    fflush(stdout);

    int client = accept(listener, NULL, NULL);
    if (client < 0) {
        bootstrap_die("accept");
    }
    close(listener);
    return client;
}

/* Connects to the server, which may still be starting. */
static inline int bootstrap_connect(const char *host, const char *port)
{
    struct addrinfo *address;
    bootstrap_resolve(host, port, &address);
    for (int attempt = 0; attempt < 600; attempt++) {
        int server = socket(address->ai_family, SOCK_STREAM, 0);
        if (connect(server, address->ai_addr, address->ai_addrlen) == 0) {
            freeaddrinfo(address);
            return server;
        }
        close(server);
        usleep(50000);
    }
    bootstrap_die("connect");
    return -1;
}

static inline void bootstrap_move(int fd, void *bytes, size_t len, int sending)
{
    for (size_t done = 0; done < len;) {
        char *at = (char *)bytes + done;
        ssize_t n = sending ? write(fd, at, len - done) : read(fd, at, len - done);
        if (n <= 0) {
            bootstrap_die(sending ? "send" : "receive");
        }
        done += (size_t)n;
    }
}

static inline void bootstrap_send(int fd, const void *bytes, size_t len)
{
    uint32_t size = htonl((uint32_t)len);
    bootstrap_move(fd, &size, sizeof size, 1);
    bootstrap_move(fd, (void *)bytes, len, 1);
}

/* Returns the number of bytes received. */
static inline size_t bootstrap_receive(int fd, void *bytes, size_t capacity)
{
    uint32_t size;
    bootstrap_move(fd, &size, sizeof size, 0);
    size_t len = ntohl(size);
    if (len > capacity) {
        fprintf(stderr, "a message of %zu bytes is over %zu\n", len, capacity);
        exit(1);
    }
    bootstrap_move(fd, bytes, len, 0);
    return len;
}

#endif
