/*
 * Two nodes: the client sends "Hello" under a tag, the server receives and prints it.
 *
 *   c++ -std=c++17 -I ../c hello.cpp -o hello $(pkg-config --cflags --libs tcpx_p2p)
 *   ./hello server 127.0.0.1 18515
 *   ./hello client 127.0.0.1 18515
 */
#include <iostream>
#include <string>

#include "bootstrap.h"
#include "tcpx_p2p.hpp"

namespace {

constexpr std::uint64_t tag = 99;
constexpr tcpx::Milliseconds patience{30000};

void server(const char *host, const char *port)
{
    tcpx::Session session("server");
    const std::string info = session.listen();
    const int bootstrap = bootstrap_serve(host, port);
    bootstrap_send(bootstrap, info.data(), info.size());

    session.accept("client", patience);
    std::string text(64, '\0');
    const std::uint64_t memory = session.registerMemory(text.data(), text.size());
    tcpx::Transfer transfer = session.createTransfer("client");
    transfer.postRecv(memory, 0, text.size(), tag);
    transfer.wait(patience);
    std::cout << "server: " << text.substr(0, transfer.received()) << std::endl;
    session.deregisterMemory(memory);
    close(bootstrap);
}

void client(const char *host, const char *port)
{
    const int bootstrap = bootstrap_connect(host, port);
    std::string info(4096, '\0');
    info.resize(bootstrap_receive(bootstrap, info.data(), info.size()));

    tcpx::Session session("client");
    session.loadRemoteConnInfo("server", info);
    session.connect("server", patience);
    std::string text = "Hello";
    const std::uint64_t memory = session.registerMemory(text.data(), text.size());
    tcpx::Transfer transfer = session.createTransfer("server");
    transfer.postSend(memory, 0, text.size(), tag);
    while (!transfer.isComplete()) {
    }
    transfer.release();
    session.deregisterMemory(memory);
    std::cout << "client: sent" << std::endl;
    close(bootstrap);
}

}  // namespace

int main(int argc, char **argv)
try {
    const std::string role = argc == 4 ? argv[1] : "";
    if (role != "server" && role != "client") {
        std::cerr << "usage: hello server|client HOST PORT\n";
        return 2;
    }
    (role == "server" ? server : client)(argv[2], argv[3]);
} catch (const tcpx::Error &error) {
    std::cerr << tcpx_status_name(error.status()) << ": " << error.what() << '\n';
    return 1;
}
