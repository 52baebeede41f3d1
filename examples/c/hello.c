/*
 * Two nodes: the client sends "Hello" under a tag, the server receives and prints it.
 *
 *   cc hello.c -o hello $(pkg-config --cflags --libs tcpx_p2p)
 *   ./hello server 127.0.0.1 18515
 *   ./hello client 127.0.0.1 18515
 */
#define _DEFAULT_SOURCE
#include "bootstrap.h"
#include "check.h"

enum { TAG = 99, CAPACITY = 64, PATIENCE_MS = 30000 };

static void server(const char *host, const char *port)
{
    tcpx_session *session = start_session("server");
    char text[CAPACITY] = "";
    tcpx_region *memory;
    OK(tcpx_session_register(session, text, sizeof text, TCPX_MEMORY_AUTO, 0, &memory));

    int bootstrap = bootstrap_serve(host, port);
    tcpx_bytes info;
    OK(tcpx_session_connection_info(session, &info));
    bootstrap_send(bootstrap, info.data, info.len);
    tcpx_bytes_free(info);

    tcpx_peer *client;
    OK(tcpx_session_accept(session, PATIENCE_MS, &client));
    tcpx_transfer *receive;
    OK(tcpx_session_recv(session, client, memory, (uintptr_t)text, sizeof text - 1, TAG, &receive));
    OK(tcpx_transfer_wait(receive, PATIENCE_MS));
    printf("server: %llu bytes from %s: %s\n", (unsigned long long)tcpx_transfer_received(receive),
           tcpx_peer_name(client), text);

    tcpx_transfer_free(receive);
    tcpx_peer_free(client);
    tcpx_region_free(memory);
    tcpx_session_free(session);
    close(bootstrap);
}

static void client(const char *host, const char *port)
{
    int bootstrap = bootstrap_connect(host, port);
    char info[4096];
    size_t info_len = bootstrap_receive(bootstrap, info, sizeof info);

    tcpx_session *session = start_session("client");
    tcpx_peer *server;
    OK(tcpx_session_add_peer(session, info, info_len, &server));
    OK(tcpx_peer_connect(server, PATIENCE_MS));

    char text[] = "Hello";
    tcpx_region *memory;
    OK(tcpx_session_register(session, text, sizeof text, TCPX_MEMORY_AUTO, 0, &memory));
    tcpx_transfer *send;
    OK(tcpx_session_send(session, server, memory, (uintptr_t)text, strlen(text), TAG, &send));
    OK(tcpx_transfer_wait(send, PATIENCE_MS));
    printf("client: sent\n");

    tcpx_transfer_free(send);
    tcpx_region_free(memory);
    tcpx_peer_free(server);
    tcpx_session_free(session);
    close(bootstrap);
}

int main(int argc, char **argv)
{
    if (argc != 4 || (strcmp(argv[1], "server") != 0 && strcmp(argv[1], "client") != 0)) {
        fprintf(stderr, "usage: hello server|client HOST PORT\n");
        return 2;
    }
    (strcmp(argv[1], "server") == 0 ? server : client)(argv[2], argv[3]);
    return 0;
}
