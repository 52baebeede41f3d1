// The C++ code of docs/c-api.md, which scripts/test-capi extracts, between two sessions.
#include "guide.inc"

#include <cstdio>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t size = 1 << 20;
constexpr tcpx::Milliseconds patience{60000};

bool check(bool condition, const char *what)
{
    if (!condition) {
        std::fprintf(stderr, "%s\n", what);
    }
    return condition;
}

}  // namespace

int main()
{
    tcpx::Session server("server");
    std::string sent = "Hello", received(sent.size(), '\0');
    const std::string info = server.listen();
    std::thread client([&] { send(info, sent.data(), sent.size()); });
    serve(server, received.data(), received.size());
    client.join();

    tcpx::Session reader("reader");
    std::vector<std::uint8_t> here(size), there(size, 7);
    const auto mine = reader.registerMemory(here.data(), size);
    const auto served = server.registerMemory(there.data(), size);
    reader.loadRemoteConnInfo("server", server.listen());
    reader.connect("server", patience);
    read_and_write(reader, mine, server.describe(served).serialize());

    bool right = check(received == sent, "the message is wrong");
    right &= check(here[0] == 7 && here[65535] == 7 && here[65536] == 0, "wrong bytes were read");
    right &= check(there[8191] == 7 && server.waitNotification(patience).message == "layer 0",
                   "wrong bytes were written");
    return right ? 0 : 1;
}
