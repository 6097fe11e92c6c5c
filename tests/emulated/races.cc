// Finds races in shared memory: two threads of a block touch the same word, one of them changes it, and nothing that orders
// memory lies between. `cuda.h` says who runs, what orders memory, and what asynchronous copies write; g++ says each load
// and store (-fsanitize=thread, whose calls are answered here in place of its library).
//
// What orders memory: __syncwarp, __syncthreads, barrier.sync, barriers in shared memory, and releases in global memory that
// another thread acquires. Shuffles and products on tensor cores do not, although lanes meet at them. It knows nothing of
// fences between loads or stores and asynchronous copies.
//
// Vector clocks, and for each word its last writes and the reads since (C. Flanagan and S. Freund, "FastTrack: efficient and
// precise dynamic race detection", PLDI 2009). A write that changes nothing races with none.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <vector>

namespace {
typedef uint32_t u32;
typedef uint64_t u64;
typedef std::vector<u32> Clock;  // how far each thread of a block is known, and the copies on each barrier

constexpr u32 BARRIERS = 256;
struct Access {
    u32 who, when;
    const void* where;
};
struct Word {
    std::vector<Access> writes;  // of one value
    std::vector<Access> reads;   // since
};
struct Meeting {
    Clock known[2];
    u32 arrived = 0;
    u64 round = 0;
    std::vector<u64> came;  // in which round each thread did
};
struct Block {
    char* shared = nullptr;
    std::vector<Clock> clocks;
    std::vector<Word> words;
    std::unordered_map<const void*, Meeting> meetings;
    std::unordered_map<const void*, Clock> released;
    std::map<std::pair<u32, u64>, Clock> phases;  // of barriers, by address and phase
    std::map<u32, u32> places;                    // of barriers in clocks, by address
};
struct Doubt {  // about a write that may change nothing, which shows when it is done
    const char* what;
    u32 word, before;
    Access other, now;
};
std::vector<Block> blocks;
std::vector<Doubt> doubts;
u32 threads, size;
Block* block;
u32 me;

void join(Clock& into, const Clock& from) {
    into.resize(threads + BARRIERS);
    for (size_t n = 0; n < from.size(); n++) into[n] = std::max(into[n], from[n]);
}
void release(Clock& into) { join(into, block->clocks[me]), block->clocks[me][me]++; }
void acquire(const Clock& from) { join(block->clocks[me], from); }
bool known(const Access& one) { return one.when <= block->clocks[me][one.who]; }
u32 value(u32 word) { return ((const u32*)block->shared)[word]; }

[[noreturn]] void fail(const Doubt& one) {
    Dl_info info;
    dladdr(one.now.where, &info);
    auto at = [&](const Access& access) { return long((const char*)access.where - (const char*)info.dli_fbase) - 1; };
    fprintf(stderr, "race in shared memory: %s at byte %u; thread %u at %lx, thread %u at %lx before; addr2line -Cfie %s\n",
            one.what, one.word * 4, one.now.who, at(one.now), one.other.who, at(one.other), info.dli_fname);
    fflush(stderr);
    _exit(71);
}
void settle() {
    for (const Doubt& one : doubts)
        if (value(one.word) != one.before) fail(one);
    doubts.clear();
}

void touch(const void* place, u32 bytes, bool writes, const void* where) {
    if (!block) return;
    settle();
    if ((const char*)place < block->shared || (const char*)place >= block->shared + size) return;
    const u32 first = u32((const char*)place - block->shared);
    const Access now{me, block->clocks[me][me], where};
    for (u32 n = first / 4; n <= (first + bytes - 1) / 4; n++) {
        auto &written = block->words[n].writes, &read = block->words[n].reads;
        const auto write = std::find_if_not(written.begin(), written.end(), known);
        if (!writes) {
            if (write != written.end() && std::none_of(written.begin(), written.end(), known))
                fail({"a read after a write", n, 0, *write, now});
            read.erase(std::remove_if(read.begin(), read.end(), known), read.end());
            read.push_back(now);
        } else {
            const auto unknown = std::find_if_not(read.begin(), read.end(), known);
            if (write != written.end()) doubts.push_back({"two writes", n, value(n), *write, now});
            else if (unknown != read.end()) doubts.push_back({"a write after a read", n, value(n), *unknown, now});
            else read.clear(), written.clear();
            written.push_back(now);
        }
    }
}
}  // namespace

extern "C" {
void race_begin(u32 count, u32 of_block, u32 bytes) {
    blocks.clear(), blocks.resize(count), threads = of_block, size = bytes, block = nullptr;
    for (Block& one : blocks) {
        one.words.resize(bytes / 4 + 1), one.clocks.assign(threads, Clock(threads + BARRIERS));
        for (u32 n = 0; n < threads; n++) one.clocks[n][n] = 1;
    }
}
void race_shared(u32 number, char* shared) { blocks[number].shared = shared; }
void race_run(int number, u32 thread) {
    if (block) settle();
    block = number < 0 ? nullptr : &blocks[number], me = thread;
}
void race_come(const void* key, u32 count) {
    Meeting& one = block->meetings[key];
    if (!one.arrived) one.known[one.round & 1].clear();
    release(one.known[one.round & 1]);
    one.came.resize(threads), one.came[me] = one.round;
    if (++one.arrived == count) one.arrived = 0, one.round++;
}
void race_leave(const void* key) {
    Meeting& one = block->meetings[key];
    acquire(one.known[one.came[me] & 1]);
}
void race_release(const void* place) { release(block->released[place]); }
void race_acquire(const void* place) { acquire(block->released[place]); }
void race_init(u32 barrier) { touch(block->shared + barrier, 8, true, __builtin_return_address(0)); }
void race_arrive(u32 barrier, u64 phase) {
    touch(block->shared + barrier, 8, false, __builtin_return_address(0));
    release(block->phases[{barrier, phase}]);
}
void race_wait(u32 barrier, u64 phase) {
    touch(block->shared + barrier, 8, false, __builtin_return_address(0));
    acquire(block->phases[{barrier, phase}]);
}
void race_copy(u32 to, u32 bytes, u32 barrier, u64 phase) {
    const void* where = __builtin_return_address(0);
    const u32 place = threads + block->places.emplace(barrier, block->places.size()).first->second;
    touch(block->shared + to, bytes, true, where);
    if (!doubts.empty()) fail(doubts[0]);
    Clock& all = block->phases[{barrier, phase}];
    all.resize(threads + BARRIERS);
    all.at(place) = u32(phase) + 1;
    for (u32 n = to / 4; n <= (to + bytes - 1) / 4; n++) block->words[n].writes.assign(1, {place, u32(phase) + 1, where});
}

#define ACCESS(name, bytes, writes) \
    void __tsan_##name##bytes(void* place) { touch(place, bytes, writes, __builtin_return_address(0)); }
#define ACCESSES(name, writes) ACCESS(name, 2, writes) ACCESS(name, 4, writes) ACCESS(name, 8, writes) ACCESS(name, 16, writes)
ACCESS(read, 1, false) ACCESSES(read, false) ACCESSES(unaligned_read, false)
ACCESS(write, 1, true) ACCESSES(write, true) ACCESSES(unaligned_write, true)
void __tsan_read_range(void* place, size_t bytes) { touch(place, bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(void* place, size_t bytes) { touch(place, bytes, true, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
uint8_t __tsan_atomic8_load(const volatile uint8_t* place, int) { return *place; }
}
