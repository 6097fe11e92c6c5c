// 2 to 64 tokens times integer copies of weights, on the tensor cores: out[n, r] = sum over k of x[n, k] * W[r, k].
//
// At few tokens a product should take the time in which its weights are read. What stands in the way is the path from a
// packed word to the tensor cores: written in Triton it leads through shared memory and costs more than the reading
// (results/LOG.md). Here a word goes from memory to the registers of the thread that hands it to the tensor core. That
// works because the order of the columns within a product is free, so long as the weights and the tokens agree on it:
// mma.m16n8k16 wants four columns of a row from each thread, and a word holds eight weights of one row. Two bit
// operations make a pair of bf16 numbers of two of them: the magnitude bits are put under the exponent of 128, and the
// offset is subtracted, which is exact. The tokens are brought into the same order when they are copied to shared memory.
//
// A warp computes ROW_TILES times 16 rows for all tokens, and sums the products of a group (64 columns) before it
// multiplies by the group's scale. SPLITS thread blocks (a cluster) share the columns of the same rows; their sums meet in
// shared memory. The layout of a copy is that of early_exit/draft_weights/integers.py.
//
// Compile with -D for: BITS (4, 5, 6, 8), TOKEN_TILES (tokens / 8, rounded up), WARPS, ROW_TILES, SPLITS, UNIT (groups
// that a warp reads at once: 4, 2 or 1, a divisor of a row's groups), BIASED (0 or 1).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

#ifndef EMULATED  // tests/unit/cuda_emulation.h stands in for this part where there is no GPU

struct __align__(16) Four { u32 v[4]; };
struct __align__(8) Two { u32 v[2]; };

__device__ __forceinline__ Two read_words(const u32* p) {  // each word is read once a product
    Two r;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(r.v[0]), "=r"(r.v[1]) : "l"(p));
    return r;
}
__device__ __forceinline__ u32 minus(u32 a, u32 b) {  // two bf16 numbers
    u32 r;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 bytes_of(u32 a, u32 b, u32 which) { return __byte_perm(a, b, which); }
__device__ __forceinline__ float half_to_float(u16 h) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(h));
    return r;
}
__device__ __forceinline__ u16 to_bf16(float f) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(f));
    return r;
}
__device__ __forceinline__ void mma(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ float of_block(const float* p, u32 block) {  // the same place in another block's shared memory
    u32 mine = (u32)__cvta_generic_to_shared(p), theirs;
    float r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(mine), "r"(block));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(r) : "r"(theirs) : "memory");
    return r;
}
#define CLUSTER __cluster_dims__(SPLITS, 1, 1)
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]

#endif

constexpr int GROUP = 64;
constexpr int WIDTH = GROUP / 8;                      // words of four bits each that hold a group of a row
constexpr int RUNS = BITS == 8 ? 2 : 1;               // with 8 bits, parts 0 to 3 and parts 4 to 7 lie apart
constexpr int TOKENS = 8 * TOKEN_TILES;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 16 * ROW_TILES * WARPS;          // of a thread block
constexpr int CHUNK = 32 / TOKEN_TILES < UNIT ? UNIT : 32 / TOKEN_TILES;  // groups whose tokens are in shared memory
constexpr int TOKEN_STRIDE = CHUNK * WIDTH + 1;       // in units of 16 bytes; one more, so that two tokens use other banks
constexpr int SUM_STRIDE = ROWS + 4;                  // the same for sums
constexpr int TOKEN_BYTES = TOKENS * TOKEN_STRIDE * 16;
constexpr int SUM_BYTES = TOKENS * SUM_STRIDE * 4;
constexpr int SHARED_BYTES = TOKEN_BYTES > SUM_BYTES ? TOKEN_BYTES : SUM_BYTES;
static_assert(SHARED_BYTES <= 48 * 1024, "more shared memory than a block gets without asking");

// What a warp has read of UNIT groups: of each row of a thread, two words (2t and 2t + 1) a group, and the scale.
struct Unit {
    Two words[ROW_TILES][2][UNIT][RUNS];
    u32 more[ROW_TILES][2][UNIT];
    u16 scales[ROW_TILES][2][UNIT];
};

// Four weights of a word as two pairs of bf16 numbers: parts (0, 2), (4, 6) for `half` 0, and (1, 3), (5, 7) for 1.
__device__ __forceinline__ void weights(const Two* words, u32 more, int j, int half, u32& first, u32& second) {
    if (BITS == 8) {
        u32 low = words[0].v[j] ^ 0x80808080u, high = words[RUNS - 1].v[j] ^ 0x80808080u;
        float f[4];
        for (int i = 0; i < 2; i++) {
            u32 which = 0x7440u + half + 2 * i;
            f[i] = __uint_as_float(bytes_of(low, 0x4B000000u, which)) - 8388736.0f;
            f[2 + i] = __uint_as_float(bytes_of(high, 0x4B000000u, which)) - 8388736.0f;
        }
        first = bytes_of(__float_as_uint(f[0]), __float_as_uint(f[1]), 0x7632);
        second = bytes_of(__float_as_uint(f[2]), __float_as_uint(f[3]), 0x7632);
        return;
    }
    u32 word = words[0].v[j] >> (8 * half);
    first = word & 0x000F000Fu;
    second = (word >> 4) & 0x000F000Fu;
    if (BITS == 5) {  // bit p of the byte belongs to part p
        u32 top = (more >> (8 * j)) & 0xFF;
        first |= (((top >> half) & 5) * 0x40010u) & 0x00100010u;
        second |= (((top >> (4 + half)) & 5) * 0x40010u) & 0x00100010u;
    }
    if (BITS == 6) {  // bits 2p and 2p + 1 of the halfword
        u32 top = (more >> (16 * j)) & 0xFFFF, low = (top >> (2 * half)) & 0x33, high = (top >> (8 + 2 * half)) & 0x33;
        first |= ((low << 4) | (low << 16)) & 0x00300030u;
        second |= ((high << 4) | (high << 16)) & 0x00300030u;
    }
    constexpr u32 offset = 0x4300u + (BITS == 8 ? 0 : 1 << (BITS - 1));  // bf16: 128 plus the middle of the range
    first = minus(first | 0x43004300u, offset * 0x10001u);
    second = minus(second | 0x43004300u, offset * 0x10001u);
}

__device__ __forceinline__ void read_unit(Unit& unit, const u32* words, const u8* more, const u16* scales, int row0, int rows,
                                          int groups, int group) {
    const int g = (threadIdx.x % 32) / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = row0 + 16 * m + 8 * h + g;
            row = row < rows ? row : rows - 1;
            const long long at = (long long)row * groups + group;
#pragma unroll
            for (int u = 0; u < UNIT; u++) {
#pragma unroll
                for (int run = 0; run < RUNS; run++)
                    unit.words[m][h][u][run] = read_words(words + ((at + u) * RUNS + run) * WIDTH + 2 * t);
                if (BITS == 5) unit.more[m][h][u] = *(const u16*)(more + (at + u) * WIDTH + 2 * t);
                if (BITS == 6) unit.more[m][h][u] = *(const u32*)(more + ((at + u) * WIDTH + 2 * t) * 2);
            }
            if (UNIT == 4) {
                const Two four = *(const Two*)(scales + at);
                for (int u = 0; u < 4; u++) unit.scales[m][h][u] = four.v[u / 2] >> (16 * (u % 2));
            } else {
                for (int u = 0; u < UNIT; u++) unit.scales[m][h][u] = scales[at + u];
            }
        }
}

// `tokens` rows of x, groups [start, start + count), in the order in which the tensor cores take them: for each token,
// group and word the values of parts 0, 2, 4, 6, 1, 3, 5, 7. Tokens that there are not are zeros.
__device__ __forceinline__ void stage_tokens(Four* staged, const u16* x, int tokens, int groups, int start, int count) {
    for (int task = threadIdx.x; task < TOKENS * count; task += THREADS) {
        const int token = task / count, group = task % count;
        Four part[8];
        for (int p = 0; p < 8; p++) {
            if (token < tokens)
                part[p] = *(const Four*)(x + ((long long)token * groups + start + group) * GROUP + p * WIDTH);
            else
                part[p] = Four{{0, 0, 0, 0}};
        }
#pragma unroll
        for (int w = 0; w < WIDTH; w++) {
            const u32 which = w % 2 ? 0x7632 : 0x5410;
            Four out;
            out.v[0] = bytes_of(part[0].v[w / 2], part[2].v[w / 2], which);
            out.v[1] = bytes_of(part[4].v[w / 2], part[6].v[w / 2], which);
            out.v[2] = bytes_of(part[1].v[w / 2], part[3].v[w / 2], which);
            out.v[3] = bytes_of(part[5].v[w / 2], part[7].v[w / 2], which);
            staged[token * TOKEN_STRIDE + group * WIDTH + w] = out;
        }
    }
}

__device__ __forceinline__ void multiply(float sums[ROW_TILES][TOKEN_TILES][4], const Unit& unit, const Four* staged, int first) {
    const int g = (threadIdx.x % 32) / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int u = 0; u < UNIT; u++) {
        u32 a[ROW_TILES][4][4];  // two words, and of each the two halves of its weights
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        weights(unit.words[m][h][u], unit.more[m][h][u], j, half, a[m][2 * j + half][h], a[m][2 * j + half][2 + h]);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            const Four* at = staged + (8 * n + g) * TOKEN_STRIDE + (first + u) * WIDTH + 2 * t;
            const Four b[2] = {at[0], at[1]};
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    mma(c, a[m][2 * j], b[j].v[0], b[j].v[1]);
                    mma(c, a[m][2 * j + 1], b[j].v[2], b[j].v[3]);
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float scale = half_to_float(unit.scales[m][h][u]);
                    sums[m][n][2 * h] += c[2 * h] * scale;
                    sums[m][n][2 * h + 1] += c[2 * h + 1] * scale;
                }
            }
        }
    }
}

// x [tokens, 64 * groups] and out [tokens, rows] bf16; words, more and scales of a copy [rows, 64 * groups]; bias [rows].
// The grid has ceil(rows / ROWS) * SPLITS blocks of THREADS threads.
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS)
few_tokens(const u16* x, const u32* words, const u8* more, const u16* scales, const u16* bias, u16* out, int tokens, int rows,
           int groups) {
    SHARED(u8, memory, SHARED_BYTES);
    Four* staged = (Four*)memory;
    const int split = blockIdx.x % SPLITS, block_row = blockIdx.x / SPLITS * ROWS;
    const int warp = threadIdx.x / 32, g = (threadIdx.x % 32) / 4, t = threadIdx.x % 4;
    const int row0 = block_row + warp * 16 * ROW_TILES;
    const int units = groups / UNIT;
    const int start = (int)((long long)units * split / SPLITS) * UNIT, end = (int)((long long)units * (split + 1) / SPLITS) * UNIT;

    float sums[ROW_TILES][TOKEN_TILES][4] = {};
    Unit now, next;
    if (start < end) read_unit(now, words, more, scales, row0, rows, groups, start);  // on its way while tokens are staged
    for (int chunk = start; chunk < end; chunk += CHUNK) {
        const int count = end - chunk < CHUNK ? end - chunk : CHUNK;
        __syncthreads();
        stage_tokens(staged, x, tokens, groups, chunk, count);
        __syncthreads();
        for (int first = 0; first < count; first += UNIT) {
            const int following = chunk + first + UNIT;
            if (following < end) read_unit(next, words, more, scales, row0, rows, groups, following);
            multiply(sums, now, staged, first);
            now = next;
        }
    }

    __syncthreads();
    float* parts = (float*)memory;  // [TOKENS][SUM_STRIDE]
    for (int m = 0; m < ROW_TILES; m++)
        for (int n = 0; n < TOKEN_TILES; n++)
            for (int i = 0; i < 4; i++)
                parts[(8 * n + 2 * t + i % 2) * SUM_STRIDE + warp * 16 * ROW_TILES + 16 * m + g + 8 * (i / 2)] = sums[m][n][i];
    if (SPLITS > 1) cluster_barrier(); else __syncthreads();
    constexpr int MINE = ROWS / SPLITS;  // rows that this block of the cluster adds up
    for (int task = threadIdx.x; task < tokens * MINE; task += THREADS) {
        const int token = task / MINE, local = split * MINE + task % MINE, row = block_row + local;
        if (row >= rows) continue;
        float total = 0.0f;
        for (int other = 0; other < SPLITS; other++)
            total += SPLITS > 1 ? of_block(parts + token * SUM_STRIDE + local, other) : parts[token * SUM_STRIDE + local];
        if (BIASED) total += __uint_as_float((u32)bias[row] << 16);
        out[(long long)token * rows + row] = to_bf16(total);
    }
    if (SPLITS > 1) cluster_barrier();  // no block ends while another reads its sums
}
