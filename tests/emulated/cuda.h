// CUDA C++ on a CPU, as far as the kernels of fused_step/ use it: a fiber for each thread, all in one thread of the host.
//
// A fiber runs until it needs others: at a shuffle, a product on tensor cores, a barrier, or when it asks memory again for
// what another block writes. A scheduler then runs another one. It takes blocks and warps at random, lets one block run
// far ahead of others, and completes asynchronous copies at random times, in any order, so that a missing wait reads what
// is not there yet. It does not find a missing fence, because fibers see each other's stores in order; with RACES, races.cc
// finds what only the order of lanes keeps from being wrong.
//
// `launch` runs a kernel to its end. What is emulated fails as it would on a GPU or louder: a deadlock, a copy of a size or to an
// address that the hardware refuses, and a barrier that gets more than it expects end the process with a message.

#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <vector>

#define EMULATED
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SHARED_MEMORY(name) char* const name = emulated::me().block->shared.data()

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class A, class B> auto min(A a, B b) { return b < a ? b : a; }
template <class A, class B> auto max(A a, B b) { return a < b ? b : a; }
using std::fabs;

// Where races in shared memory are looked for (races.cc): who runs, what orders memory, and what copies write.
#ifdef RACES
#define RACE(...) __VA_ARGS__;
#else
#define RACE(...) inline __VA_ARGS__ {}
#endif
extern "C" {
RACE(void race_begin(unsigned blocks, unsigned threads, unsigned bytes))
RACE(void race_shared(unsigned block, char* shared))
RACE(void race_run(int block, unsigned thread))
RACE(void race_come(const void* meeting, unsigned count))
RACE(void race_leave(const void* meeting))
RACE(void race_arrive(unsigned barrier, uint64_t phase))
RACE(void race_wait(unsigned barrier, uint64_t phase))
RACE(void race_init(unsigned barrier))
RACE(void race_copy(unsigned to, unsigned bytes, unsigned barrier, uint64_t phase))
RACE(void race_release(const void* place))
RACE(void race_acquire(const void* place))
}

namespace emulated {
typedef uint32_t u32;
typedef uint64_t u64;

[[noreturn]] inline void fail(const char* why) {
    fprintf(stderr, "emulated kernel: %s\n", why);
    fflush(stderr);
    _exit(70);
}

// ---- what threads share ------------------------------------------------------------------------------------------
// Some fibers that wait for each other. The last one to come acts for all.
struct Meeting {
    u32 arrived = 0;
    u64 number = 0;
};
struct Warp {
    std::map<u32, Meeting> meetings;  // by the mask of lanes
    u32 given[32][8], taken[32][4];   // what lanes give to a common action, and what they get
};
struct Barrier {
    u32 expected = 0, pending = 0;
    long long bytes = 0;
    u64 phase = 0;
    void complete() {
        if (pending == 0 && bytes == 0) phase++, pending = expected;
    }
};
struct Block {
    int number = 0;
    std::vector<char> shared;
    std::vector<Warp> warps;
    std::map<u32, Meeting> meetings;  // of barrier.sync, by number
    std::map<u32, Barrier> barriers;  // in shared memory, by address
};
struct Fiber {
    ucontext_t context;
    jmp_buf at;
    Block* block;
    Warp* warp;
    u32 thread;
    bool begun = false, ended = false;
};
struct Copy {
    Block* block;
    char* to;
    const void* from;
    u32 bytes, barrier;
};

struct Grid {
    std::vector<Block> blocks;
    std::vector<Fiber> fibers;
    std::vector<Copy> copies;
    std::mt19937 random;
    std::function<void()> kernel;
    jmp_buf scheduler;
    Fiber* running = nullptr;
    u64 progress = 0;  // what happened, to tell a deadlock
    u32 threads = 0;
};
inline Grid& grid() {
    static Grid one;
    return one;
}
inline Fiber& me() { return *grid().running; }

inline void yield() {
    Fiber& fiber = me();
    if (!_setjmp(fiber.at)) _longjmp(grid().scheduler, 1);
}
template <class Condition>
void wait_until(Condition condition) {
    while (!condition()) yield();
    grid().progress++;
}
template <class Action>
void meet(Meeting& meeting, u32 count, Action action) {
    const u64 number = meeting.number;
    if (++meeting.arrived < count) {
        wait_until([&] { return meeting.number != number; });
        return;
    }
    action();
    meeting.arrived = 0, meeting.number++, grid().progress++;
}
template <class Action>
void warp_meets(u32 mask, Action action) {
    meet(me().warp->meetings[mask], __builtin_popcount(mask), action);
}

// ---- the scheduler -----------------------------------------------------------------------------------------------
inline void entry() {
    grid().kernel();
    me().ended = true;
    grid().progress++;
    _longjmp(grid().scheduler, 1);
}
inline void resume(Fiber& fiber) {
    if (fiber.ended) return;
    grid().running = &fiber;
    race_run(fiber.block->number, fiber.thread);
    if (_setjmp(grid().scheduler)) return race_run(-1, 0);
    if (fiber.begun) _longjmp(fiber.at, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}
inline void complete_one_copy() {
    Grid& g = grid();
    if (g.copies.empty()) return;
    const size_t n = g.random() % g.copies.size();
    const Copy copy = g.copies[n];
    g.copies[n] = g.copies.back();
    g.copies.pop_back();
    memcpy(copy.to, copy.from, copy.bytes);
    Barrier& barrier = copy.block->barriers[copy.barrier];
    barrier.bytes -= copy.bytes;
    barrier.complete();
    g.progress++;
}

constexpr size_t STACK = 128 << 10;

// Runs a kernel to its end. seed: of the order in which threads and copies run; 0 takes blocks in turn.
inline void launch(std::function<void()> kernel, int blocks, int threads, u32 shared_bytes, u32 seed) {
    Grid& g = grid();
    g.blocks.assign(blocks, Block());
    g.fibers.assign(size_t(blocks) * threads, Fiber());
    g.copies.clear(), g.random.seed(seed), g.kernel = kernel, g.threads = threads;
    char* const stacks = (char*)mmap(nullptr, STACK * g.fibers.size(), PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) fail("no memory for stacks");
    for (int b = 0; b < blocks; b++) {
        Block& block = g.blocks[b];
        block.number = b, block.shared.assign(shared_bytes, char(0xff)), block.warps.resize(threads / 32);
        for (int t = 0; t < threads; t++) {
            Fiber& fiber = g.fibers[size_t(b) * threads + t];
            fiber.block = &block, fiber.warp = &block.warps[t / 32], fiber.thread = t;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = stacks + STACK * (size_t(b) * threads + t);
            fiber.context.uc_stack.ss_size = STACK, fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, entry, 0);
        }
    }
    race_begin(blocks, threads, shared_bytes);
    for (Block& block : g.blocks) race_shared(block.number, block.shared.data());
    const int warps = threads / 32;
    u64 seen = 0, idle = 0, turn = 0;
    while (true) {
        bool ended = true;
        for (const Fiber& fiber : g.fibers) ended &= fiber.ended;
        if (ended) break;
        const int block = seed ? g.random() % blocks : turn++ % blocks;
        for (int n = seed ? 1 << g.random() % 7 : 8; n > 0; n--) {  // now and then one block runs far
            for (int w = 0; w < warps; w++) {
                const int warp = seed ? g.random() % warps : w;
                u64 before;
                int left = 64;
                do {
                    before = g.progress;
                    for (u32 lane = 0; lane < 32; lane++) resume(g.fibers[(size_t(block) * warps + warp) * 32 + lane]);
                } while (g.progress != before && --left > 0);
            }
            if (!seed || g.random() % 4 == 0) complete_one_copy();
        }
        idle = g.progress == seen && g.copies.empty() ? idle + 1 : 0, seen = g.progress;
        if (idle > 400u * blocks) fail("deadlock: no thread can go on");
    }
    if (!g.copies.empty()) fail("the kernel ended before its copies");
    munmap(stacks, STACK * g.fibers.size());
}

// ---- arithmetic --------------------------------------------------------------------------------------------------
inline float float_of(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline u32 bits_of(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline u32 bfloat(float x) {  // to the nearest, of two as near the even one
    const u32 bits = bits_of(x);
    if (std::isnan(x)) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float half(u32 bits) {
    const u32 sign = bits >> 15 & 1, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    if (exponent == 31) fail("a half that is not finite");
    const float size = exponent ? ldexpf(1024 + mantissa, int(exponent) - 25) : ldexpf(mantissa, -24);
    return sign ? -size : size;
}

struct Index {
    u32 x;
};
}  // namespace emulated

#define threadIdx (emulated::Index{emulated::me().thread})
#define blockIdx (emulated::Index{emulated::u32(emulated::me().block->number)})
#define FULL_MASK 0xffffffffu

inline float __uint_as_float(unsigned bits) { return emulated::float_of(bits); }
inline unsigned __float_as_uint(float x) { return emulated::bits_of(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __log2f(float x) { return log2f(x); }
inline void __trap() { emulated::fail("a thread waited in vain"); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
    const emulated::u64 both = emulated::u64(b) << 32 | a;
    unsigned found = 0;
    for (int n = 0; n < 4; n++) found |= unsigned(both >> (which >> n * 4 & 7) * 8 & 255) << n * 8;
    return found;
}
// Meetings that order memory. key: of those who meet.
template <class Action>
void meet_in_order(const void* key, unsigned count, Action action) {
    race_come(key, count);
    action();
    race_leave(key);
}
inline void meet_by_number(unsigned number, unsigned count) {
    emulated::Meeting& one = emulated::me().block->meetings[number];
    meet_in_order(&one, count, [&] { emulated::meet(one, count, [] {}); });
}
inline void __syncwarp() { meet_in_order(emulated::me().warp, 32, [] { emulated::warp_meets(FULL_MASK, [] {}); }); }
inline void __syncthreads() { meet_by_number(0, emulated::grid().threads); }
template <int NUMBER, int THREADS_MEETING> void synchronize() { meet_by_number(NUMBER, THREADS_MEETING); }

template <class T>
T shuffle(unsigned mask, T value, unsigned from) {
    static_assert(sizeof(T) <= 8, "a word or two");
    emulated::Warp& warp = *emulated::me().warp;
    const unsigned lane = emulated::me().thread % 32;
    memcpy(warp.given[lane], &value, sizeof(T));
    warp.given[lane][2] = from & 31;
    emulated::warp_meets(mask, [&] {
        for (int n = 0; n < 32; n++)
            if (mask >> n & 1) memcpy(warp.taken[n], warp.given[warp.given[n][2]], 8);
    });
    memcpy(&value, warp.taken[lane], sizeof(T));
    return value;
}
template <class T> T __shfl_sync(unsigned mask, T value, int from) { return shuffle(mask, value, from); }
template <class T> T __shfl_xor_sync(unsigned mask, T value, unsigned by) {
    return shuffle(mask, value, emulated::me().thread % 32 ^ by);
}

// ---- the instructions of ptx.cu ----------------------------------------------------------------------------------
inline unsigned pack(float first, float second) { return emulated::bfloat(second) << 16 | emulated::bfloat(first); }
inline float half_to_float(unsigned bits) { return emulated::half(bits & 0xffff); }
inline unsigned mask_and_flip(unsigned word, unsigned mask, unsigned flipped) { return (word & mask) ^ flipped; }
template <class Action>
unsigned of_pairs(unsigned a, unsigned b, Action action) {
    using emulated::float_of;
    return pack(action(float_of(a << 16), float_of(b << 16)), action(float_of(a & 0xffff0000u), float_of(b & 0xffff0000u)));
}
inline unsigned subtract_pairs(unsigned a, unsigned b) { return of_pairs(a, b, [](float x, float y) { return x - y; }); }
inline unsigned multiply_pairs(unsigned a, unsigned b) { return of_pairs(a, b, [](float x, float y) { return x * y; }); }
inline float exp2_fast(float x) { return exp2f(x); }
inline int hidden_from_compiler(int number) { return number; }

// Rows of a times columns of b, as the PTX manual lays fragments out. A register holds EACH values of neighbouring k; four
// lanes have them for 4 * EACH products, and a second register goes on behind these. value(register, n): its n-th value.
template <class Sum, int PRODUCTS, int EACH, class Value>
void on_tensor_cores(Sum* c, std::initializer_list<unsigned> registers, Value value) {
    constexpr int REGISTERS_OF_A = PRODUCTS / (2 * EACH), RUN = 4 * EACH;
    emulated::Warp& warp = *emulated::me().warp;
    const unsigned lane = emulated::me().thread % 32;
    int count = 0;
    for (unsigned one : registers) warp.given[lane][count++] = one;
    memcpy(warp.taken[lane], c, 16);
    emulated::warp_meets(FULL_MASK, [&] {
        for (int n = 0; n < 128; n++) {
            const int row = n / 8, column = n % 8, owner = row % 8 * 4 + column / 2, which = row / 8 * 2 + column % 2;
            Sum sum;
            memcpy(&sum, &warp.taken[owner][which], 4);
            double all = sum;
            for (int k = 0; k < PRODUCTS; k++) {
                const int pair = k % RUN / EACH, more = k / RUN;
                const unsigned a = warp.given[row % 8 * 4 + pair][row / 8 + more * 2];
                const unsigned b = warp.given[column * 4 + pair][REGISTERS_OF_A + more];
                all += double(value(a, k % EACH)) * value(b, k % EACH);
            }
            sum = Sum(all);
            memcpy(&warp.taken[owner][which], &sum, 4);
        }
    });
    memcpy(c, warp.taken[lane], 16);
}
inline float bfloat_at(unsigned word, int n) { return emulated::float_of(n ? word & 0xffff0000u : word << 16); }
inline int byte_at(unsigned word, int n) { return int8_t(word >> n * 8); }
inline void multiply(int* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    c[0] = c[1] = c[2] = c[3] = 0;
    on_tensor_cores<int, 32, 4>(c, {a0, a1, a2, a3, b0, b1}, byte_at);
}
inline void multiply_add(
    int* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1, const int* c
) {
    for (int n = 0; n < 4; n++) d[n] = c[n];
    on_tensor_cores<int, 32, 4>(d, {a0, a1, a2, a3, b0, b1}, byte_at);
}
inline void multiply_add(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    on_tensor_cores<float, 16, 2>(c, {a0, a1, a2, a3, b0, b1}, bfloat_at);
}
inline void multiply_add(float* c, unsigned a0, unsigned a1, unsigned b0) {
    on_tensor_cores<float, 8, 2>(c, {a0, a1, b0}, bfloat_at);
}

// Loads and stores are of the moment. Who loads may wait for what others store, so others run first.
inline unsigned long long load_relaxed(const unsigned long long* place) { return *(const volatile unsigned long long*)place; }
inline void load_relaxed(const unsigned long long* place, unsigned long long& a, unsigned long long& b) {
    a = load_relaxed(place), b = load_relaxed(place + 1);
}
inline float4 load_relaxed(const float4* place) { return *place; }
inline void store_relaxed(unsigned long long* place, unsigned long long value) {
    *(volatile unsigned long long*)place = value;
    emulated::grid().progress++;
}
inline unsigned long long load_acquire(const unsigned long long* place) {
    race_acquire(place);
    return load_relaxed(place);
}
inline void add_release(unsigned long long* place, unsigned long long value) {
    race_release(place);
    store_relaxed(place, *place + value);
}
inline unsigned count_acquire_release(unsigned* place, unsigned last) {
    race_release(place), race_acquire(place);
    const unsigned before = *place;
    *place = before >= last ? 0 : before + 1;
    emulated::grid().progress++;
    return before;
}
inline void prefetch(const void* place) { (void)*(const volatile char*)place; }
inline unsigned long long nanoseconds() { return emulated::grid().progress; }

inline unsigned address(const void* place) { return unsigned((const char*)place - emulated::me().block->shared.data()); }
inline unsigned long long read_once() { return 0; }
inline void copy_async(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
    emulated::Block& block = *emulated::me().block;
    if (bytes == 0 || bytes % 16 || to % 16 || uintptr_t(from) % 16) emulated::fail("a copy that is not of 16 bytes each");
    if (to + bytes > block.shared.size()) emulated::fail("a copy beyond shared memory");
    emulated::grid().copies.push_back({&block, block.shared.data() + to, from, bytes, barrier});
    race_copy(to, bytes, barrier, block.barriers[barrier].phase);
}
inline void copy_async(unsigned to, const void* from, unsigned bytes, unsigned barrier, unsigned long long) {
    copy_async(to, from, bytes, barrier);
}
inline void fence_copies() {}
inline void fence_barriers() {}
inline emulated::Barrier& barrier_at(unsigned barrier) {
    auto& all = emulated::me().block->barriers;
    if (!all.count(barrier)) emulated::fail("a barrier that was not begun");
    return all[barrier];
}
inline void barrier_init(unsigned barrier, unsigned arrivals) {
    if (barrier % 8) emulated::fail("a barrier that is not at 8 bytes");
    race_init(barrier);
    emulated::me().block->barriers[barrier] = {arrivals, arrivals, 0, 0};
}
inline void barrier_arrive_and_expect(unsigned barrier, unsigned bytes) {
    emulated::Barrier& one = barrier_at(barrier);
    if (one.pending == 0) emulated::fail("more arrivals than a barrier expects");
    if (bytes >= 1 << 20) emulated::fail("more bytes than a barrier can expect");
    race_arrive(barrier, one.phase);
    one.pending--, one.bytes += bytes;
    one.complete();
    emulated::grid().progress++;
}
inline void barrier_arrive(unsigned barrier) { barrier_arrive_and_expect(barrier, 0); }
inline void barrier_wait(unsigned barrier, unsigned parity) {
    emulated::Barrier& one = barrier_at(barrier);
    emulated::wait_until([&] { return (one.phase & 1) != parity; });
    race_wait(barrier, one.phase - 1);
}
template <int COUNT> void fewer_registers() {}
template <int COUNT> void more_registers() {}
inline void let_others_run() { emulated::yield(); }
