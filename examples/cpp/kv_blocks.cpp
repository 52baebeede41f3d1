/*
 * Two nodes: the client reads scattered KV blocks from the server's memory, then notifies it. The
 * server's application only waits.
 *
 *   c++ -std=c++17 -I ../c kv_blocks.cpp -o kv_blocks $(pkg-config --cflags --libs tcpx_p2p)
 *   ./kv_blocks server 127.0.0.1 18515
 *   ./kv_blocks client 127.0.0.1 18515
 */
#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "bootstrap.h"
#include "tcpx_p2p.hpp"

namespace {

constexpr std::size_t block = 16 << 10;
constexpr std::size_t blocks = 4096;
constexpr tcpx::Milliseconds patience{30000};

void server(const char *host, const char *port)
{
    tcpx::Session session("prefill");
    std::vector<std::uint8_t> cache(blocks * block);
    for (std::size_t i = 0; i < blocks; i++) {
        std::fill_n(cache.begin() + static_cast<std::ptrdiff_t>(i * block), block, static_cast<std::uint8_t>(i % 251));
    }
    const std::uint64_t memory = session.registerMemory(cache.data(), cache.size());

    const int bootstrap = bootstrap_serve(host, port);
    const std::string info = session.listen(), descriptor = session.describe(memory).serialize();
    bootstrap_send(bootstrap, info.data(), info.size());
    bootstrap_send(bootstrap, descriptor.data(), descriptor.size());

    const tcpx::Notification note = session.waitNotification(patience);
    std::cout << "server: " << note.from << " says \"" << note.message << '"' << std::endl;
    session.deregisterMemory(memory);
    close(bootstrap);
}

void client(const char *host, const char *port)
{
    const int bootstrap = bootstrap_connect(host, port);
    std::string info(4096, '\0'), descriptor(256, '\0');
    info.resize(bootstrap_receive(bootstrap, info.data(), info.size()));
    descriptor.resize(bootstrap_receive(bootstrap, descriptor.data(), descriptor.size()));

    tcpx::Session session("decode");
    session.loadRemoteConnInfo("prefill", info);
    const auto theirs = tcpx::MemoryDescriptor::deserialize(descriptor);
    std::vector<std::uint8_t> cache(blocks * block);
    const std::uint64_t mine = session.registerMemory(cache.data(), cache.size());

    // Visits the blocks in another order: the stride reaches each of them once.
    std::vector<tcpx::Segment> segments;
    segments.reserve(blocks);
    for (std::size_t i = 0; i < blocks; i++) {
        segments.push_back({mine, i * block, theirs, i * 1001 % blocks * block, block});
    }
    tcpx::Transfer transfer = session.createTransfer("prefill");
    transfer.read(segments, "I have all blocks");
    transfer.wait(patience);

    for (std::size_t i = 0; i < cache.size(); i++) {
        if (cache[i] != i / block * 1001 % blocks % 251) {
            std::cerr << "client: byte " << i << " is wrong\n";
            std::exit(1);
        }
    }
    std::cout << "client: " << blocks << " blocks of " << block << " bytes, all right" << std::endl;
    session.deregisterMemory(mine);
    close(bootstrap);
}

}  // namespace

int main(int argc, char **argv)
try {
    const std::string role = argc == 4 ? argv[1] : "";
    if (role != "server" && role != "client") {
        std::cerr << "usage: kv_blocks server|client HOST PORT\n";
        return 2;
    }
    (role == "server" ? server : client)(argv[2], argv[3]);
} catch (const tcpx::Error &error) {
    std::cerr << tcpx_status_name(error.status()) << ": " << error.what() << '\n';
    return 1;
}
