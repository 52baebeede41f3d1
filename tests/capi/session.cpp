// Tests the C++ classes: two sessions in one process, every method, and failures.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "tcpx_p2p.hpp"

#define CHECK(condition)                                                          \
    do {                                                                          \
        if (!(condition)) {                                                       \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);  \
            std::exit(1);                                                         \
        }                                                                         \
    } while (0)

namespace {

constexpr std::size_t size = 1 << 20;
constexpr tcpx::Milliseconds patience{20000};

template <class F>
tcpx_status status_of(F &&f)
{
    try {
        f();
    } catch (const tcpx::Error &error) {
        CHECK(error.what()[0] != '\0');
        return error.status();
    }
    return TCPX_OK;
}

std::vector<std::uint8_t> pattern(unsigned seed)
{
    std::vector<std::uint8_t> bytes(size);
    for (auto &byte : bytes) {
        seed = seed * 1664525u + 1013904223u;
        byte = static_cast<std::uint8_t>(seed >> 24);
    }
    return bytes;
}

}  // namespace

int main()
{
    CHECK(tcpx::version() == tcpx_version());
    CHECK(status_of([] { tcpx::Config().set("lane", "2"); }) == TCPX_ERROR_INVALID_ARGUMENT);

    tcpx::Session alice("alice", tcpx::Config().set("lanes", "2")), bob("bob");
    CHECK(alice.name() == "alice");
    CHECK(status_of([&] { alice.connect("b"); }) == TCPX_ERROR_NOT_FOUND);
    CHECK(status_of([&] { alice.loadRemoteConnInfo("b", "junk"); }) == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(status_of([&] { alice.accept("b", tcpx::Milliseconds(1)); }) == TCPX_ERROR_TIMEOUT);
    alice.loadRemoteConnInfo("b", bob.listen());
    alice.connect("b", patience);
    CHECK(bob.accept("a", patience) == "alice");

    std::vector<std::uint8_t> here = pattern(1), there(size);
    const std::uint64_t mine = alice.registerMemory(here.data(), size);
    const std::uint64_t theirs = bob.registerMemory(there.data(), size, tcpx::Memory::Host);
    CHECK(mine != 0 && theirs != 0);
    const auto descriptor = tcpx::MemoryDescriptor::deserialize(bob.describe(theirs).serialize());
    CHECK(descriptor.size() == size && descriptor.address() == reinterpret_cast<std::uintptr_t>(there.data()));
    CHECK(status_of([] { tcpx::MemoryDescriptor::deserialize("x"); }) == TCPX_ERROR_INVALID_ARGUMENT);

    // One piece, then many with a notification, then the same again.
    tcpx::Transfer transfer = alice.createTransfer("b");
    CHECK(transfer.isComplete());
    transfer.write(mine, 10, descriptor, 20, size - 20);
    transfer.wait(patience);
    CHECK(transfer.isComplete());
    CHECK(std::memcmp(here.data() + 10, there.data() + 20, size - 20) == 0);
    transfer.release();
    std::vector<tcpx::Segment> segments;
    for (std::size_t i = 0; i < 256; i++) {
        segments.push_back({mine, i * 4096, descriptor, (255 - i) * 4096, 4096});
    }
    for (int round = 0; round < 2; round++) {
        std::fill(there.begin(), there.end(), std::uint8_t{0});
        round == 0 ? transfer.write(segments, "there") : transfer.repost("there");
        while (!transfer.isComplete()) {
        }
        for (std::size_t i = 0; i < 256; i++) {
            CHECK(std::memcmp(here.data() + i * 4096, there.data() + (255 - i) * 4096, 4096) == 0);
        }
        const auto note = bob.waitNotification(patience);
        CHECK(note.from == "alice" && note.message == "there");
    }
    const std::vector<std::uint8_t> fresh = pattern(2);
    std::copy(fresh.begin(), fresh.end(), there.begin());
    tcpx::Transfer reading = alice.createTransfer("b");
    reading.read(mine, 0, descriptor, 0, size);
    reading.wait(patience);
    CHECK(here == there);

    // Tagged messages both ways at once, from two threads.
    std::vector<std::uint8_t> up = pattern(3), down(size), other = pattern(4), back(size);
    const std::uint64_t up_id = alice.registerMemory(up.data(), size), back_id = alice.registerMemory(back.data(), size);
    const std::uint64_t down_id = bob.registerMemory(down.data(), size), other_id = bob.registerMemory(other.data(), size);
    std::thread server([&] {
        tcpx::Transfer t = bob.createTransfer("a");
        t.postSend(other_id, 0, size, 7);
        t.postRecv(down_id, 0, size, 8);
        t.wait(patience);
        CHECK(t.received() == size);
    });
    tcpx::Transfer both = alice.createTransfer("b");
    both.postSend(up_id, 0, size, 8);
    both.postRecv(back_id, 0, size, 7);
    both.wait(patience);
    server.join();
    CHECK(up == down && other == back);

    alice.notify("b", std::string_view("a\0b", 3));
    std::vector<tcpx::Notification> notes;
    while (notes.empty()) {
        notes = bob.takeNotifications();
    }
    CHECK(notes.size() == 1 && notes[0].message == std::string("a\0b", 3));

    // Invalid calls.
    CHECK(status_of([&] { transfer.read(mine, size, descriptor, 0, 1); }) == TCPX_ERROR_INVALID_ARGUMENT);
    CHECK(status_of([&] { transfer.read(999, 0, descriptor, 0, 1); }) == TCPX_ERROR_NOT_FOUND);
    bob.deregisterMemory(theirs);
    CHECK(status_of([&] { bob.deregisterMemory(theirs); }) == TCPX_ERROR_NOT_FOUND);
    reading.repost();
    CHECK(status_of([&] { reading.wait(patience); }) == TCPX_ERROR_REGION_GONE);
    CHECK(status_of([&] { reading.isComplete(); }) == TCPX_ERROR_REGION_GONE);

    // A receive without a send: dropped by release, and by the destructor.
    tcpx::Transfer never = alice.createTransfer("b");
    never.postRecv(back_id, 0, size, 1234);
    CHECK(!never.isComplete());
    CHECK(status_of([&] { never.wait(tcpx::Milliseconds(5)); }) == TCPX_ERROR_TIMEOUT);
    never.release();
    never.postRecv(back_id, 0, size, 1235);
    alice.disconnect("b");

    // A closed session serves nothing, even while a transfer still refers to it; blocked calls
    // learn of the end.
    std::vector<std::uint8_t> closed(size);
    std::unique_ptr<tcpx::Transfer> survivor;
    std::optional<tcpx::MemoryDescriptor> offered;
    {
        tcpx::Session carol("carol");
        offered = carol.describe(carol.registerMemory(closed.data(), size));
        alice.loadRemoteConnInfo("c", carol.listen());
        carol.loadRemoteConnInfo("a", alice.listen());
        survivor = std::make_unique<tcpx::Transfer>(carol.createTransfer("a"));
        tcpx::Session copy = carol;
        std::thread waiting([&] { CHECK(status_of([&] { copy.waitNotification(); }) == TCPX_ERROR_CLOSED); });
        carol.close();
        waiting.join();
        CHECK(status_of([&] { copy.accept("anybody"); }) == TCPX_ERROR_CLOSED);
    }
    tcpx::Transfer late = alice.createTransfer("c");
    late.write(mine, 0, *offered, 0, size);
    CHECK(status_of([&] { late.wait(patience); }) == TCPX_ERROR_DISCONNECTED);
    CHECK(std::all_of(closed.begin(), closed.end(), [](std::uint8_t byte) { return byte == 0; }));
    std::printf("tcpx_p2p.hpp %s: all good\n", tcpx::version().c_str());
}
