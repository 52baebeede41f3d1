#include "standin.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

namespace tcpx::standin {
namespace {

struct Parameter {
    const char *key;
    const char *value;  // UCX's default
    bool listed;        // listed by UCX's own backend
};

constexpr std::array<Parameter, 9> PARAMETERS = {{
    {"ucx_devices", "", true},
    {"num_workers", "1", true},
    {"ucx_error_handling_mode", "peer", true},
    {"device_list", "", false},
    {"num_threads", "0", false},
    {"split_batch_size", "1024", false},
    {"ucx_num_device_channels", "4", false},
    {"engine_config", "", false},
    {"ucx_ep_close_force", "false", false},
}};

// Maximum of the setting `workers`.
constexpr unsigned long MAX_WORKERS = 64;

void require(tcpx_status status)
{
    if (status != TCPX_OK) {
        throw std::runtime_error(tcpx_last_error());
    }
}

// Returns whether a more specific setting overrides UCX's parameter.
bool is_decided(const nixl::Params &params, const char *setting,
                std::initializer_list<const char *> variables)
{
    const auto is_set = [](const char *name) {
        const char *value = std::getenv(name);
        return value && *value;
    };
    return params.contains(setting) || std::any_of(variables.begin(), variables.end(), is_set);
}

// Sets `workers` from UCX's num_threads: both count the threads that move data. 0 leaves the number
// to the backend.
void apply_threads(const std::string &value, tcpx_config *config)
{
    unsigned long threads = 0;
    const auto *end = value.data() + value.size();
    const auto parsed = std::from_chars(value.data(), end, threads);
    if (parsed.ec != std::errc() || parsed.ptr != end) {
        throw std::runtime_error("num_threads=" + value + ": expected a whole number of threads");
    }
    if (threads > 0) {
        const auto workers = std::to_string(std::min(threads, MAX_WORKERS));
        require(tcpx_config_set(config, "workers", workers.c_str()));
    }
}

// Parses names of UCX's devices, separated by commas; empty if one is not an interface.
std::vector<std::string> interfaces_of(const std::string &devices)
{
    std::vector<std::string> names;
    for (std::size_t start = 0; start < devices.size();) {
        const auto end = std::min(devices.find_first_of(", ", start), devices.size());
        if (const auto name = devices.substr(start, end - start); !name.empty()) {
            const auto place = "/sys/class/net/" + name;
            if (name.find('/') != std::string::npos || ::access(place.c_str(), F_OK) != 0) {
                return {};
            }
            names.push_back(name);
        }
        start = end + 1;
    }
    return names;
}

// Returns true if every device is a network interface, and then selects them.
bool apply_devices(const std::string &value, tcpx_config *config)
{
    std::string list;
    for (const auto &name : interfaces_of(value)) {
        list += (list.empty() ? "=" : ",") + name;
    }
    if (!list.empty()) {
        require(tcpx_config_set(config, "interfaces", list.c_str()));
    }
    return !list.empty();
}

// Returns a UCX address without any device, which UCX parses to its end and then cannot reach: a
// header, an ID, the length 255 of a name, the name, and the mark of an empty list. The length
// equals that mark, for UCX builds that do not read names.
const std::string &wrapping()
{
    static const std::string bytes = [] {
        constexpr char v1_with_id_and_name = 0x30, nothing = '\xff';
        std::string name = "TCPX:tcpx nixl install --as UCX";  // UCX prints 31 characters of it
        name.resize(255, ' ');
        return v1_with_id_and_name + std::string("TCPX-UCX") + nothing + name + nothing;
    }();
    return bytes;
}

}  // namespace

const char *loaded_as()
{
    static const bool is_ucx = [] {
        Dl_info self{};
        if (dladdr(reinterpret_cast<const void *>(&wrapping), &self) == 0 || !self.dli_fname) {
            return false;
        }
        const std::string_view path(self.dli_fname);
        return path.substr(path.rfind('/') + 1) == "libplugin_UCX.so";
    }();
    return is_ucx ? UCX.data() : "TCPX";
}

nixl::Params options()
{
    nixl::Params rows;
    for (const auto &parameter : PARAMETERS) {
        if (parameter.listed) {
            rows.emplace(parameter.key, parameter.value);
        }
    }
    return rows;
}

bool knows(const std::string &key)
{
    return std::any_of(PARAMETERS.begin(), PARAMETERS.end(),
                       [&](const Parameter &parameter) { return parameter.key == key; });
}

std::string apply(const nixl::Params &params, tcpx_config *config)
{
    std::string unused;
    for (const auto &[key, standard, listed] : PARAMETERS) {
        const auto given = params.find(key);
        if (given == params.end() || given->second == standard) {
            continue;
        }
        const std::string_view name = key;
        if (name == "num_threads") {
            if (!is_decided(params, "workers", {"TCPX_WORKERS"})) {
                apply_threads(given->second, config);
            }
            continue;
        }
        const auto variables = {"TCPX_INTERFACES", "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"};
        if ((name == "device_list" || name == "ucx_devices") &&
            (is_decided(params, "interfaces", variables) || apply_devices(given->second, config))) {
            continue;
        }
        unused += (unused.empty() ? "" : ", ") + std::string(key) + "=" + given->second;
    }
    return unused;
}

void report_unused(const std::string &unused)
{
    static std::mutex lock;
    static std::set<std::string> reported;
    const std::lock_guard guard(lock);
    if (!unused.empty() && reported.insert(unused).second) {
        tcpx_log_warning("TCPX stands in for UCX; parameters of UCX that have no effect here",
                         unused.c_str());
    }
}

std::string wrap(const std::string &info) { return wrapping() + info; }

std::string_view unwrap(std::string_view info)
{
    if (info.starts_with(wrapping())) {
        info.remove_prefix(wrapping().size());
    }
    return info;
}

}  // namespace tcpx::standin
