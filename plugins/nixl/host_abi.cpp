#include "host_abi.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

namespace tcpx {
namespace {

constexpr std::string_view SLOTS[] = {
#include "slots.inc"
};

constexpr std::string_view BASE_TABLE = "_ZTV17nixlBackendEngine";
constexpr std::string_view PURE = "__cxa_pure_virtual";
// The offset to the top of the object and the type precede the functions.
constexpr std::size_t HEAD = 2 * sizeof(void *);

// A file mapped read-only.
class Mapped {
public:
    explicit Mapped(const std::filesystem::path &path)
    {
        const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (file < 0) {
            return;
        }
        struct stat info {};
        if (::fstat(file, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 0) {
            void *start = ::mmap(nullptr, info.st_size, PROT_READ, MAP_PRIVATE, file, 0);
            if (start != MAP_FAILED) {
                bytes_ = {static_cast<const char *>(start), static_cast<std::size_t>(info.st_size)};
            }
        }
        ::close(file);
    }
    Mapped(const Mapped &) = delete;
    Mapped &operator=(const Mapped &) = delete;
    ~Mapped()
    {
        if (!bytes_.empty()) {
            ::munmap(const_cast<char *>(bytes_.data()), bytes_.size());
        }
    }

    // Views `count` values at an offset; null if the file is too short or they are not aligned.
    template <typename T>
    const T *at(std::uint64_t offset, std::uint64_t count = 1) const
    {
        const bool fits = offset <= bytes_.size() && count <= (bytes_.size() - offset) / sizeof(T);
        return fits && offset % alignof(T) == 0
                   ? reinterpret_cast<const T *>(bytes_.data() + offset)
                   : nullptr;
    }

    // Returns the text at an offset, up to its NUL.
    std::string_view text(std::uint64_t offset) const
    {
        if (offset >= bytes_.size()) {
            return {};
        }
        const auto rest = bytes_.substr(offset);
        return rest.substr(0, rest.find('\0'));
    }

private:
    std::string_view bytes_;
};

struct Table {
    std::string_view name;
    std::uint64_t address, size;
};

// The virtual tables that a library exports, and the function that is relocated to each address.
struct Exports {
    std::vector<Table> tables;
    std::map<std::uint64_t, std::string_view> functions;
};

Exports exports_of(const Mapped &file)
{
    Exports found;
    const auto *head = file.at<Elf64_Ehdr>(0);
    if (!head || file.text(0).substr(0, SELFMAG) != ELFMAG ||
        head->e_ident[EI_CLASS] != ELFCLASS64) {
        return found;
    }
    const auto *sections = file.at<Elf64_Shdr>(head->e_shoff, head->e_shnum);
    if (!sections) {
        return found;
    }
    const auto symbols_of = [&](const Elf64_Shdr &section) {
        return file.at<Elf64_Sym>(section.sh_offset, section.sh_size / sizeof(Elf64_Sym));
    };
    const auto name_of = [&](const Elf64_Shdr &section, const Elf64_Sym &symbol) {
        return section.sh_link < head->e_shnum
                   ? file.text(sections[section.sh_link].sh_offset + symbol.st_name)
                   : std::string_view();
    };
    for (std::size_t i = 0; i < head->e_shnum; i++) {
        const auto &section = sections[i];
        if (section.sh_type == SHT_DYNSYM) {
            const auto *symbols = symbols_of(section);
            const auto count = symbols ? section.sh_size / sizeof(Elf64_Sym) : 0;
            for (std::size_t k = 0; k < count; k++) {
                const auto name = name_of(section, symbols[k]);
                if (symbols[k].st_shndx != SHN_UNDEF && name.starts_with("_ZTV")) {
                    found.tables.push_back({name, symbols[k].st_value, symbols[k].st_size});
                }
            }
        } else if (section.sh_type == SHT_RELA && section.sh_link < head->e_shnum) {
            const auto &dynamic = sections[section.sh_link];
            const auto *symbols = symbols_of(dynamic);
            const auto *entries =
                file.at<Elf64_Rela>(section.sh_offset, section.sh_size / sizeof(Elf64_Rela));
            const auto count = symbols && entries ? section.sh_size / sizeof(Elf64_Rela) : 0;
            for (std::size_t k = 0; k < count; k++) {
                const auto symbol = ELF64_R_SYM(entries[k].r_info);
                if (symbol > 0 && symbol < dynamic.sh_size / sizeof(Elf64_Sym)) {
                    found.functions[entries[k].r_offset] = name_of(dynamic, symbols[symbol]);
                }
            }
        }
    }
    return found;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Returns the mangled name of a method of a class outside namespaces, without the class; empty for
// anything else. Signatures abbreviate parts that occurred before, such as the class, so only
// methods of such classes can be compared.
std::string_view method(std::string_view mangled)
{
    for (const std::string_view start : {"_ZNK", "_ZN"}) {
        if (mangled.starts_with(start)) {
            mangled.remove_prefix(start.size());
            std::size_t length = 0, digits = 0;
            while (digits < std::min<std::size_t>(mangled.size(), 4) && is_digit(mangled[digits])) {
                length = length * 10 + static_cast<std::size_t>(mangled[digits++] - '0');
            }
            return digits > 0 && digits + length < mangled.size() ? mangled.substr(digits + length)
                                                                  : std::string_view();
        }
    }
    return {};
}

// Returns the plain name: connect of 7connectERK…
std::string plain(std::string_view method)
{
    std::size_t length = 0, digits = 0;
    while (digits < std::min<std::size_t>(method.size(), 4) && is_digit(method[digits])) {
        length = length * 10 + static_cast<std::size_t>(method[digits++] - '0');
    }
    return std::string(digits > 0 ? method.substr(digits, length) : "the destructor");
}

// Returns the difference between an engine's table and SLOTS; empty if it begins with the same
// functions.
std::string compare(const Exports &exports, const Table &table)
{
    for (std::size_t i = 2; i < std::size(SLOTS); i++) {
        const auto function = exports.functions.find(table.address + HEAD + i * sizeof(void *));
        if (function == exports.functions.end() || function->second == PURE) {
            continue;
        }
        const auto found = method(function->second);
        if (!found.empty() && found != SLOTS[i]) {
            const auto is = plain(found), was = plain(SLOTS[i]);
            return "function " + std::to_string(i) + " is " + is + ", not " + was +
                   (is == was ? " as it was" : "");
        }
    }
    return {};
}

// Returns the difference in one of NIXL's backends; nothing if it has no table.
std::optional<std::string> differing_in(const std::filesystem::path &library)
{
    const Mapped file(library);
    const Exports exports = exports_of(file);
    const auto base = std::find_if(exports.tables.begin(), exports.tables.end(),
                                   [](const Table &table) { return table.name == BASE_TABLE; });
    if (base == exports.tables.end()) {
        return std::nullopt;
    }
    if (auto difference = compare(exports, *base); !difference.empty()) {
        return difference;
    }
    const auto count = (base->size - std::min<std::uint64_t>(base->size, HEAD)) / sizeof(void *);
    if (count != std::size(SLOTS)) {
        return "it has " + std::to_string(count) + " functions, not " +
               std::to_string(std::size(SLOTS));
    }
    // The names of pure virtual functions are in the tables of derived classes.
    for (const Table &table : exports.tables) {
        const auto first = exports.functions.lower_bound(table.address);
        const auto last = exports.functions.lower_bound(table.address + table.size);
        const bool is_engine = std::any_of(first, last, [](const auto &function) {
            return method(function.second) == SLOTS[2];
        });
        if (is_engine) {
            if (auto difference = compare(exports, table); !difference.empty()) {
                return difference;
            }
        }
    }
    return "";
}

// Lists the backends in a folder, beginning with those that every NIXL has: others may come from
// elsewhere.
std::vector<std::filesystem::path> backends_in(const std::filesystem::path &folder)
{
    std::vector<std::filesystem::path> found;
    std::error_code error;
    for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
         entry.increment(error)) {
        if (entry->path().filename().native().starts_with("libplugin_")) {
            found.push_back(entry->path());
        }
    }
    const auto rank = [](const std::filesystem::path &path) {
        const std::string name = path.filename().native();
        return name.starts_with("libplugin_UCX.so") ? 0 : name == "libplugin_POSIX.so" ? 1 : 2;
    };
    std::sort(found.begin(), found.end(), [&](const auto &a, const auto &b) {
        return std::pair(rank(a), a) < std::pair(rank(b), b);
    });
    return found;
}

}  // namespace

std::string differing_abi(const void *caller)
{
    Dl_info library{};
    if (dladdr(caller, &library) == 0 || !library.dli_fname) {
        return {};
    }
    const std::filesystem::path nixl(library.dli_fname);
    for (const auto &backend : backends_in(nixl.parent_path() / "plugins")) {
        if (const auto difference = differing_in(backend)) {
            return difference->empty()
                       ? *difference
                       : nixl.native() + " calls backends in another way (" + *difference + ")";
        }
    }
    return {};
}

}  // namespace tcpx
