// Runs one CUDA kernel of ours on the CPU: a thread for each of the device's threads, barriers where it has barriers, and
// the tensor cores' product by what its documentation says of who holds which element. Slow, and only for tests.
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

struct Four { std::uint32_t v[4]; };
struct Two { std::uint32_t v[2]; };

struct Place { unsigned x; };
struct Warp {
    std::uint32_t a[32][4], b[32][2];
    std::barrier<> together{32};
};
struct Block {
    std::vector<std::uint32_t> memory;  // holds garbage at first, as the device's does
    std::unique_ptr<std::barrier<>> together;
    std::vector<std::unique_ptr<Warp>> warps;
};
struct Cluster {
    std::vector<Block> blocks;
    std::unique_ptr<std::barrier<>> together;
};

static thread_local Place threadIdx, blockIdx;
static thread_local Cluster* cluster_of_thread;
static thread_local Block* block_of_thread;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define CLUSTER
#define SHARED(type, name, count) type* name = (type*)block_of_thread->memory.data()

inline void __syncthreads() { block_of_thread->together->arrive_and_wait(); }
inline void cluster_barrier() { cluster_of_thread->together->arrive_and_wait(); }
inline float of_block(const float* p, std::uint32_t block) {
    auto offset = p - (const float*)block_of_thread->memory.data();
    return ((const float*)cluster_of_thread->blocks[block].memory.data())[offset];
}

inline float __uint_as_float(std::uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline std::uint32_t __float_as_uint(float f) { std::uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }
inline float from_bf16(std::uint32_t bits) { return __uint_as_float(bits << 16); }
inline std::uint16_t to_bf16(float f) {  // to the nearest, to even
    std::uint32_t bits = __float_as_uint(f);
    return (std::uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
inline float half_to_float(std::uint16_t bits) { _Float16 h; std::memcpy(&h, &bits, 2); return (float)h; }
inline Two read_words(const std::uint32_t* p) { return Two{{p[0], p[1]}}; }
inline std::uint32_t minus(std::uint32_t a, std::uint32_t b) {
    std::uint32_t r = 0;
    for (int i = 0; i < 32; i += 16) r |= (std::uint32_t)to_bf16(from_bf16((a >> i) & 0xFFFF) - from_bf16((b >> i) & 0xFFFF)) << i;
    return r;
}
inline std::uint32_t bytes_of(std::uint32_t a, std::uint32_t b, std::uint32_t which) {
    std::uint64_t both = ((std::uint64_t)b << 32) | a;
    std::uint32_t r = 0;
    for (int i = 0; i < 4; i++) r |= (std::uint32_t)((both >> (8 * ((which >> (4 * i)) & 7))) & 0xFF) << (8 * i);
    return r;
}
inline void mma(float c[4], const std::uint32_t a[4], std::uint32_t b0, std::uint32_t b1) {
    const int lane = threadIdx.x % 32;
    Warp& warp = *block_of_thread->warps[threadIdx.x / 32];
    std::memcpy(warp.a[lane], a, 16);
    warp.b[lane][0] = b0, warp.b[lane][1] = b1;
    warp.together.arrive_and_wait();
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        for (int k = 0; k < 16; k++) {
            const int holder = (k % 8) / 2, shift = 16 * (k % 2);
            const std::uint32_t left = warp.a[row % 8 * 4 + holder][row / 8 + 2 * (k / 8)];
            const std::uint32_t right = warp.b[column * 4 + holder][k / 8];
            c[i] += from_bf16((left >> shift) & 0xFFFF) * from_bf16((right >> shift) & 0xFFFF);
        }
    }
    warp.together.arrive_and_wait();
}

#define EMULATED
#include KERNEL

// The same arguments as the kernel.
extern "C" void emulate(const u16* x, const u32* words, const u8* more, const u16* scales, const u16* bias, u16* out, int tokens,
                        int rows, int groups) {
    for (int tile = 0; tile * ROWS < rows; tile++) {
        Cluster cluster;
        cluster.together = std::make_unique<std::barrier<>>(SPLITS * THREADS);
        cluster.blocks.resize(SPLITS);
        for (Block& block : cluster.blocks) {
            block.memory.assign(SHARED_BYTES / 4, 0x7FC00000u);  // not numbers
            block.together = std::make_unique<std::barrier<>>(THREADS);
            for (int w = 0; w < WARPS; w++) block.warps.push_back(std::make_unique<Warp>());
        }
        std::vector<std::thread> threads;
        for (unsigned block = 0; block < SPLITS; block++)
            for (unsigned thread = 0; thread < THREADS; thread++)
                threads.emplace_back([&, block, thread] {
                    threadIdx.x = thread, blockIdx.x = tile * SPLITS + block;
                    cluster_of_thread = &cluster, block_of_thread = &cluster.blocks[block];
                    few_tokens(x, words, more, scales, bias, out, tokens, rows, groups);
                });
        for (std::thread& thread : threads) thread.join();
    }
}
