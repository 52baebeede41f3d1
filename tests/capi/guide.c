/* The C code of docs/c-api.md, which scripts/test-capi extracts, between two sessions. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "check.h"

enum { SIZE = 64 << 20 };

static void wait_in_epoll(tcpx_session *session, tcpx_transfer *transfer)
{
    int epoll = epoll_create1(0);
#include "wait_in_epoll.inc"
    close(epoll);
    tcpx_events_free(events);
}

int main(void)
{
    tcpx_session *alice = start_session("alice"), *bob = start_session("bob");
    uint8_t *here = calloc(1, SIZE), *there = malloc(SIZE);
    tcpx_region *mine, *served;
    tcpx_bytes info, descriptor;
    tcpx_peer *peer;
    tcpx_remote_region *theirs;
    tcpx_transfer *transfer;
    tcpx_state state;
    if (!here || !there) {
        return 1;
    }
    memset(there, 7, SIZE);
    OK(tcpx_session_register(alice, here, SIZE, TCPX_MEMORY_AUTO, 0, &mine));
    OK(tcpx_session_register(bob, there, SIZE, TCPX_MEMORY_AUTO, 0, &served));
    OK(tcpx_session_connection_info(bob, &info));
    OK(tcpx_region_descriptor(served, &descriptor));
    OK(tcpx_session_add_peer(alice, info.data, info.len, &peer));
    OK(tcpx_remote_region_from_bytes(descriptor.data, descriptor.len, &theirs));
    tcpx_bytes_free(info);
    tcpx_bytes_free(descriptor);
    tcpx_segment segment = {mine, (uintptr_t)here, theirs, tcpx_remote_region_address(theirs), SIZE};
    OK(tcpx_session_prepare(alice, TCPX_READ, peer, &segment, 1, &transfer));

    wait_in_epoll(alice, transfer);
    OK(tcpx_transfer_poll(transfer, &state));
    if (state != TCPX_DONE || memcmp(here, there, SIZE) != 0) {
        fprintf(stderr, "the transfer is not done, or its bytes are wrong\n");
        return 1;
    }
    tcpx_transfer_free(transfer);
    tcpx_remote_region_free(theirs);
    tcpx_peer_free(peer);
    tcpx_region_free(mine);
    tcpx_region_free(served);
    tcpx_session_free(alice);
    tcpx_session_free(bob);
    free(here);
    free(there);
    return 0;
}
