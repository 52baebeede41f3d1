/*
 * Two nodes: the client reads scattered KV blocks from the server's memory, then notifies it. The
 * server's application only waits.
 *
 *   cc kv_blocks.c -o kv_blocks $(pkg-config --cflags --libs tcpx_p2p)
 *   ./kv_blocks server 127.0.0.1 18515
 *   ./kv_blocks client 127.0.0.1 18515
 */
#define _DEFAULT_SOURCE
#include "bootstrap.h"
#include "check.h"

enum { BLOCK = 16 << 10, BLOCKS = 4096, PATIENCE_MS = 30000 };

static void print_notification(void *context, const char *from, size_t from_len, const uint8_t *message,
                               size_t message_len)
{
    (void)context;
    printf("server: %.*s says \"%.*s\"\n", (int)from_len, from, (int)message_len, (const char *)message);
}

static uint8_t *new_cache(void)
{
    uint8_t *cache = calloc(BLOCKS, BLOCK);
    if (!cache) {
        bootstrap_die("calloc");
    }
    return cache;
}

static void server(const char *host, const char *port)
{
    tcpx_session *session = start_session("prefill");
    uint8_t *cache = new_cache();
    for (size_t i = 0; i < BLOCKS; i++) {
        memset(cache + i * BLOCK, (int)(i % 251), BLOCK);
    }
    tcpx_region *region;
    tcpx_bytes info, descriptor;
    OK(tcpx_session_register(session, cache, (size_t)BLOCKS * BLOCK, TCPX_MEMORY_AUTO, 0, &region));
    OK(tcpx_session_connection_info(session, &info));
    OK(tcpx_region_descriptor(region, &descriptor));

    int bootstrap = bootstrap_serve(host, port);
    bootstrap_send(bootstrap, info.data, info.len);
    bootstrap_send(bootstrap, descriptor.data, descriptor.len);
    tcpx_bytes_free(info);
    tcpx_bytes_free(descriptor);

    OK(tcpx_session_wait_notification(session, PATIENCE_MS, print_notification, NULL));
    tcpx_region_free(region);
    tcpx_session_free(session);
    free(cache);
    close(bootstrap);
}

static void client(const char *host, const char *port)
{
    int bootstrap = bootstrap_connect(host, port);
    char info[4096], descriptor[256];
    size_t info_len = bootstrap_receive(bootstrap, info, sizeof info);
    size_t descriptor_len = bootstrap_receive(bootstrap, descriptor, sizeof descriptor);

    tcpx_session *session = start_session("decode");
    tcpx_peer *peer;
    tcpx_remote_region *theirs;
    tcpx_region *mine;
    OK(tcpx_session_add_peer(session, info, info_len, &peer));
    OK(tcpx_remote_region_from_bytes(descriptor, descriptor_len, &theirs));
    uint8_t *cache = new_cache();
    OK(tcpx_session_register(session, cache, (size_t)BLOCKS * BLOCK, TCPX_MEMORY_AUTO, 0, &mine));

    /* Visits the blocks in another order: the stride reaches each of them once. */
    tcpx_segment *segments = calloc(BLOCKS, sizeof *segments);
    if (!segments) {
        bootstrap_die("calloc");
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        segments[i].local = mine;
        segments[i].local_address = (uintptr_t)(cache + i * BLOCK);
        segments[i].remote = theirs;
        segments[i].remote_address = tcpx_remote_region_address(theirs) + i * 1001 % BLOCKS * BLOCK;
        segments[i].length = BLOCK;
    }
    tcpx_transfer *read;
    OK(tcpx_session_prepare(session, TCPX_READ, peer, segments, BLOCKS, &read));
    free(segments);
    OK(tcpx_transfer_post_with_notification(read, "I have all blocks", 17));
    OK(tcpx_transfer_wait(read, PATIENCE_MS));

    for (size_t i = 0; i < BLOCKS; i++) {
        for (size_t b = 0; b < BLOCK; b++) {
            if (cache[i * BLOCK + b] != i * 1001 % BLOCKS % 251) {
                fprintf(stderr, "client: byte %zu of block %zu is wrong\n", b, i);
                exit(1);
            }
        }
    }
    printf("client: %d blocks of %d bytes, all right\n", BLOCKS, BLOCK);

    tcpx_transfer_free(read);
    tcpx_region_free(mine);
    tcpx_remote_region_free(theirs);
    tcpx_peer_free(peer);
    tcpx_session_free(session);
    free(cache);
    close(bootstrap);
}

int main(int argc, char **argv)
{
    if (argc != 4 || (strcmp(argv[1], "server") != 0 && strcmp(argv[1], "client") != 0)) {
        fprintf(stderr, "usage: kv_blocks server|client HOST PORT\n");
        return 2;
    }
    (strcmp(argv[1], "server") == 0 ? server : client)(argv[2], argv[3]);
    return 0;
}
