// All decoder layers of a draft step in one kernel; layout.py makes what it reads, launch.py compiles and launches it.
//
// One block a multiprocessor. Every warp has a stream of 4-bit weights of its own, in the order in which it needs them
// in the whole trunk, and copies it ahead of time into a ring in shared memory. So the memory is read without a pause
// while blocks exchange activations. They do that without a barrier: what a phase writes is words of 64 bits, 32 of
// them a flag that tells the layer and the launch, and who needs a word reads it until its flag is right.
//
// A weight tile is 16 rows. Of its columns a record holds one group of 64: 512 bytes of integers in the order in which
// lanes multiply them, and 16 scales in half precision. Tokens are rounded to signed bytes by 32 columns and multiplied
// on tensor cores, tokens as the even columns of a product with 16 rows of weights. A weight is the high half of a byte
// there, so 16 times itself.
//
// Constants by -D: LAYERS HIDDEN INTER QH KVH DIM (query heads, heads, dimensions) NT (tokens) WARPS NB (blocks)
// RECORDS (of a chunk of a ring, at most) SLOTS (chunks of a
// ring) CHUNKS (of a layer, at most) TILES (most tiles of a block in a phase) ROWS (most tiles of
// the residual in a block) PAGE BIAS QKNORM ROPE_FLOAT EPSILON DIRECT (most splits that readers add up themselves)

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define QKV ((QH + 2 * KVH) * DIM)
#define HEADS_OUT (QH * DIM)
#define GROUP_HEADS (QH / KVH)
#define THREADS (WARPS * 32)
#define RECORD 544
#define CHUNK (RECORD * RECORDS)
#define GROUPS_H (HIDDEN / 64)
#define GROUPS_O (HEADS_OUT / 64)
#define GROUPS_I (INTER / 64)
#define MAX2(a, b) ((a) > (b) ? (a) : (b))
#define MOST_GROUPS ((MAX2(MAX2(GROUPS_H, GROUPS_O), GROUPS_I) + WARPS - 1) / WARPS)
#define SPLITS (MAX2(1, NB / (NT * KVH)) < 64 ? MAX2(1, NB / (NT * KVH)) : 64)
#ifndef PROBE
#define PROBE 1
#endif
#define FULL 0xffffffffu
#define LOG2E 1.4426950408889634f

// ---- shared memory, in bytes -----------------------------------------------------------------------------------
#define ACT_WARP (MOST_GROUPS * NT * 64)
#define FAC_WARP (MOST_GROUPS * NT * 8)
#define SUMS_GEMV (WARPS * (TILES + ROWS) * NT * 16 * 4)
#define SUMS_ATT (WARPS * GROUP_HEADS * (DIM + 2) * 4)
#define SUMS ((MAX2(SUMS_GEMV, SUMS_ATT) + 15) / 16 * 16)
#define AT_ACT (WARPS * SLOTS * CHUNK)
#define AT_FAC (AT_ACT + WARPS * ACT_WARP)
#define AT_SUMS (AT_FAC + WARPS * FAC_WARP)
#define AT_SQUARES (AT_SUMS + SUMS)
#define AT_RESIDUAL (AT_SQUARES + WARPS * NT * 4)
#define AT_QUERY (AT_RESIDUAL + (ROWS * 16 * NT * 4 + 15) / 16 * 16)
#define AT_NEW (AT_QUERY + 8 * (DIM + 8) * 2)
#define AT_ROPE (AT_NEW + 2 * DIM * 2)
#define AT_BARRIERS (AT_ROPE + NT * DIM * 4)
#define AT_SIZES (AT_BARRIERS + WARPS * SLOTS * 8)
#define SHARED_BYTES (AT_SIZES + WARPS * CHUNKS * 2)

// ---- words that blocks exchange, in units of 8 bytes -----------------------------------------------------------
#define PK_X 0                                      // [NT][HIDDEN / 2] the residual before a layer
#define PK_QKV (PK_X + NT * HIDDEN / 2)             // [NT][QKV / 2]
#define PK_PART (PK_QKV + NT * QKV / 2)             // [NT][SPLITS][HEADS_OUT / 2] attention of some keys
#define PK_LSE (PK_PART + NT * SPLITS * HEADS_OUT / 2)  // [NT][SPLITS][QH] log2 of the sum of their shares
#define PK_ATT (PK_LSE + (NT * SPLITS * QH + 1) / 2 * 2)  // [NT][HEADS_OUT / 2] attention
#define PK_MID (PK_ATT + NT * HEADS_OUT / 2)        // [NT][HIDDEN / 2] the residual after attention
#define PK_GATED (PK_MID + NT * HIDDEN / 2)         // [NT][INTER / 4] what comes before down, as bytes
#define PK_FACTOR (PK_GATED + NT * INTER / 4)       // [NT][INTER / 32] and their factors
#define PK_WORDS (PK_FACTOR + NT * INTER / 32)

struct Arguments {
    const char* stream;        // every warp's records
    const long long* offsets;  // [NB * WARPS] where its stream begins, in bytes
    const int* plan;           // [NB][6] first tile and tiles of qkv, of the residual's rows (o and down), of gate and up
    const u16* norms;          // [LAYERS][2][HIDDEN]
    const u16* bias;           // [LAYERS][QKV]
    const u16* head_norms;     // [LAYERS][2][DIM], of queries and keys
    const u16* final_norm;     // [HIDDEN]
    const u16* embedding;      // [vocabulary][HIDDEN]
    const void* rope;          // [positions][DIM] cosines, then sines
    const u64* caches;         // [LAYERS] addresses of the layers' keys
    u64* words;                // [PK_WORDS]
    u32* launches;
    const int* ids;
    const long long* positions;
    const int* lengths;
    const long long* slots;
    const int* table;
    u16* out;                  // [NT][HIDDEN]
    long long cache_block, cache_head, cache_token, cache_value;  // strides, and where values begin, in elements
    long long table_row;
    u32* profile;              // [NB][16] with -DPROFILE: cycles of the first warp between marks, over all layers
    float scale;               // of the scores, times log2(e)
};
#ifdef PROFILE
#define MARK(n) do { u32 now = clock(); spent[n] += now - last; last = now; } while (0)
#else
#define MARK(n)
#endif

// With -DPATIENCE=N who waits in vain gives up after N tries, to find an error by.
#ifdef NOCHAIN
#define TRY(n) break
#elif defined(PATIENCE)
#define TRY(n) if (++n > PATIENCE) __trap()
#else
#define TRY(n)
#endif

// ---- small things ----------------------------------------------------------------------------------------------
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float plain(u16 value) { return __uint_as_float(u32(value) << 16); }
__device__ __forceinline__ u32 pack(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
__device__ __forceinline__ float half_to_float(u32 bits) {
    float value;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(bits));
    return value;
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 address(const void* place) { return u32(__cvta_generic_to_shared(place)); }

struct Two {
    u32 a, flag_a, b, flag_b;
    __device__ __forceinline__ bool there(u32 flag) const { return flag_a == flag && flag_b == flag; }
};
__device__ __forceinline__ Two read_two(const u64* place) {
    u64 a, b;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(place) : "memory");
    return {u32(a), u32(a >> 32), u32(b), u32(b >> 32)};
}
__device__ __forceinline__ u64 read_one(const u64* place) {
    u64 a;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(a) : "l"(place) : "memory");
    return a;
}
__device__ __forceinline__ u32 wait_one(const u64* place, u32 flag) {
    u64 word = read_one(place);
    [[maybe_unused]] u32 tries = 0;
    while (u32(word >> 32) != flag) {
        TRY(tries);
        word = read_one(place);
    }
    return u32(word);
}
__device__ __forceinline__ void wait_both(const u64* place, const u64* other, u32 flag, u32& one, u32& two) {
    u64 word = read_one(place), another = read_one(other);
    [[maybe_unused]] u32 tries = 0;
    while (u32(word >> 32) != flag || u32(another >> 32) != flag) {
        TRY(tries);
        word = read_one(place), another = read_one(other);
    }
    one = u32(word), two = u32(another);
}
__device__ __forceinline__ void tell(u64* place, u32 value, u32 flag) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(place), "l"(u64(flag) << 32 | value) : "memory");
}

// ---- a warp's stream of weights --------------------------------------------------------------------------------
// A chunk is at most RECORDS records of one phase. Every layer has the same chunks; their sizes are in shared memory.
struct Ring {
    const char* next;
    const u16* sizes;
    char* slots;
    u32 barriers, slot, parity, coming, chunks, left;  // coming: chunk of a layer that is requested next
    u64 policy;

    __device__ __forceinline__ void request(u32 to, u32 lane) {
#ifndef NOWEIGHTS
        if (left > 0) {
            u32 bytes = sizes[coming];
            if (lane == 0) {
                u32 barrier = barriers + to * 8;
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
                asm volatile(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                    ::"r"(address(slots + to * CHUNK)), "l"(next), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
            }
            next += bytes, left--;
            if (++coming == chunks) coming = 0;
        }
#endif
    }
    __device__ __forceinline__ void begin(const char* from, const u16* layer, u32 count, char* where, u32 barrier, u32 lane) {
        next = from, sizes = layer, chunks = count, left = count * LAYERS, slots = where, barriers = barrier;
        slot = parity = coming = 0;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        if (lane == 0) {
#pragma unroll 1
            for (u32 n = 0; n < SLOTS; n++)
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + n * 8) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
#pragma unroll 1
        for (u32 n = 0; n < SLOTS; n++) request(n, lane);
    }
    // Where the next chunk is. It is there when this returns.
    __device__ __forceinline__ const char* chunk() {
#ifndef NOWEIGHTS
        asm volatile(
            "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\n"
            "bra AGAIN;\nDONE:\n}" ::"r"(barriers + slot * 8), "r"(parity) : "memory");
#endif
        return slots + slot * CHUNK;
    }
    __device__ __forceinline__ void used(u32 lane) {
        __syncwarp();
        request(slot, lane);
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void multiply(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}

struct Lane {
    u32 warp, lane, row, pair;  // row: of a tile, and of a product's columns; pair: token whose sums the lane has
    char *act, *fac;            // the warp's tokens as bytes [groups][NT][64], and their factors [groups][NT][2]
};

struct Sums {
    float above, below;  // of rows `row` and `row + 8` of a tile
};

__device__ __forceinline__ uint4 bytes_of(const Lane& me, int group) {
    bool holds = !(me.row & 1) && me.row < 2 * NT;
    return holds ? *(const uint4*)(me.act + (group * NT + me.row / 2) * 64 + (me.lane & 3) * 16) : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ float2 factors_of(const Lane& me, int group) {
    return *(const float2*)(me.fac + (group * NT + me.pair) * 8);
}

__device__ __forceinline__ void multiply_record(Sums& sums, uint4 w, u32 scales, uint4 tokens, float2 factor) {
    const u32 M = 0xf0f0f0f0u;
    int first[4], second[4];
    multiply(first, (w.x << 4) & M, (w.y << 4) & M, w.x & M, w.y & M, tokens.x, tokens.y);
    multiply(second, (w.z << 4) & M, (w.w << 4) & M, w.z & M, w.w & M, tokens.z, tokens.w);
    float above = fmaf(float(first[0]), factor.x, float(second[0]) * factor.y);
    float below = fmaf(float(first[2]), factor.x, float(second[2]) * factor.y);
    sums.above = fmaf(half_to_float(scales & 0xffff), above, sums.above);
    sums.below = fmaf(half_to_float(scales >> 16), below, sums.below);
}

// Records of the next chunk: whole tiles, or a part of one.
__device__ __forceinline__ int records_of_chunk(int left, int group, int groups) {
    return groups <= RECORDS ? min(RECORDS / groups * groups, left) : min(RECORDS, groups - group);
}

// The warp's share of the columns of `tiles` tiles, into sums [tiles][NT][16]. One place in the kernel calls it, with
// one loop for all phases: code that is run once a layer waits for its instructions longer than for anything else.
__device__ __forceinline__ void product(Ring& ring, const Lane& me, int tiles, int groups, float* to) {
    int left = tiles * groups, group = 0;
    Sums sums = {0.f, 0.f};
#pragma unroll 1
    while (left > 0) {
        const int count = records_of_chunk(left, group, groups);
        left -= count;
        const char* record = ring.chunk();
        uint4 weights[RECORDS], tokens[RECORDS];
        u32 scales[RECORDS];
        float2 factors[RECORDS];
        bool ends[RECORDS];
#pragma unroll
        for (int n = 0; n < RECORDS; n++) {
            const bool here = n < count;  // what is not there is another with scales of 0
            const char* at = record + (here ? n : 0) * RECORD;
            weights[n] = *(const uint4*)(at + me.lane * 16);
            scales[n] = here ? *(const u32*)(at + 512 + me.row * 4) : 0;
            tokens[n] = bytes_of(me, group);
            factors[n] = factors_of(me, group);
            ends[n] = here && group + 1 == groups;
            group = !here ? group : ends[n] ? 0 : group + 1;
        }
        Sums each[RECORDS];
#pragma unroll
        for (int n = 0; n < RECORDS; n++) {
            each[n] = {0.f, 0.f};
            multiply_record(each[n], weights[n], scales[n], tokens[n], factors[n]);
        }
#pragma unroll
        for (int n = 0; n < RECORDS; n++) {
            sums.above += each[n].above, sums.below += each[n].below;
            if (ends[n] && (me.lane & 3) < NT) to[me.pair * 16 + me.row] = sums.above, to[me.pair * 16 + me.row + 8] = sums.below;
            if (ends[n]) sums = {0.f, 0.f}, to += NT * 16;
        }
        ring.used(me.lane);
    }
}

// Bytes of the chunks of a phase, in the order in which `product` takes them; returns behind the last.
__device__ __forceinline__ u16* sizes_of(u16* to, int tiles, int groups) {
    int left = tiles * groups, group = 0;
#pragma unroll 1
    while (left > 0) {
        const int count = records_of_chunk(left, group, groups);
        left -= count, *to++ = count * RECORD;
        group = groups <= RECORDS || group + count == groups ? 0 : group + count;
    }
    return to;
}

// ---- tokens as bytes -------------------------------------------------------------------------------------------
// Items `start` to start + N - 1: item n is 128 columns of token n / MOST, four in each lane, as far as they exist.
template <int MOST, int N>
__device__ __forceinline__ void store_rounded(const Lane& me, const float (&x)[N][4], int start, int groups) {
    float most[N];
#pragma unroll
    for (int n = 0; n < N; n++) most[n] = fmaxf(fmaxf(fabsf(x[n][0]), fabsf(x[n][1])), fmaxf(fabsf(x[n][2]), fabsf(x[n][3])));
#pragma unroll
    for (int d = 1; d < 8; d *= 2) {
#pragma unroll
        for (int n = 0; n < N; n++) most[n] = fmaxf(most[n], __shfl_xor_sync(FULL, most[n], d));
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float magic = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
        float inverse = most[n] > 0.f ? __fdividef(127.f, most[n]) : 0.f;
        u32 word = __byte_perm(
            __byte_perm(__float_as_uint(fmaf(x[n][0], inverse, magic)), __float_as_uint(fmaf(x[n][1], inverse, magic)), 0x40),
            __byte_perm(__float_as_uint(fmaf(x[n][2], inverse, magic)), __float_as_uint(fmaf(x[n][3], inverse, magic)), 0x40),
            0x5410);
        int token = (start + n) / MOST, column = (start + n) % MOST * 128 + me.lane * 4;
        if (token < NT && column < groups * 64) {
            int place = column / 64 * NT + token, c = column % 64;
            *(u32*)(me.act + place * 64 + (c % 32) / 8 * 16 + c / 32 * 8 + c % 8) = word;
            if ((me.lane & 7) == 0) *(float*)(me.fac + place * 8 + c / 32 * 4) = most[n] * (1.f / (127.f * 16.f));
        }
    }
}

template <int COLUMNS>
constexpr int ITEMS_OF = ((COLUMNS / 64 + WARPS - 1) / WARPS + 1) / 2;  // of a token, for one warp

// A norm's weights for the warp's columns, four in each lane for every item.
struct Gains {
    uint2 of[ITEMS_OF<HIDDEN>];
    __device__ __forceinline__ void read(const Lane& me, const u16* weight, int begin, int groups) {
#pragma unroll
        for (int n = 0; n < ITEMS_OF<HIDDEN>; n++) {
            int column = n * 128 + me.lane * 4;
            of[n] = column < groups * 64 ? *(const uint2*)(weight + begin * 64 + column) : make_uint2(0, 0);
        }
    }
};

// The warp's groups of tokens [NT][COLUMNS / 2] as bytes. NORM: times gains; squares: sums of squares [NT].
template <int COLUMNS, bool NORM>
__device__ __forceinline__ void take(
    const Lane& me, const u64* words, u32 flag, const Gains& gains, int begin, int groups, float* squares
) {
    constexpr int MOST = ITEMS_OF<COLUMNS>, ITEMS = MOST * NT;
    constexpr int BATCH = ITEMS < 12 ? ITEMS : 12;
    float square[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) square[n] = 0.f;
    __syncwarp();  // the bytes of the phase before have been read
#pragma unroll
    for (int start = 0; start < ITEMS; start += BATCH) {
        Two found[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            int item = start + n, token = item / MOST, column = item % MOST * 128 + me.lane * 4;
            bool here = item < ITEMS && column < groups * 64;
            found[n] = Two{0, flag, 0, flag};
            if (here) found[n] = read_two(words + (token * COLUMNS + begin * 64 + column) / 2);
        }
        bool all = false;
        [[maybe_unused]] u32 tries = 0;
        while (!all) {
            TRY(tries);
            all = true;
#pragma unroll
            for (int n = 0; n < BATCH; n++) {
                int item = start + n, token = item / MOST, column = item % MOST * 128 + me.lane * 4;
                if (!found[n].there(flag)) {
                    found[n] = read_two(words + (token * COLUMNS + begin * 64 + column) / 2);
                    all = false;
                }
            }
        }
        __syncwarp();
        float x[BATCH][4];
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            int token = (start + n) / MOST;
            x[n][0] = low(found[n].a), x[n][1] = high(found[n].a), x[n][2] = low(found[n].b), x[n][3] = high(found[n].b);
            if (NORM && token < NT) {
#pragma unroll
                for (int i = 0; i < 4; i++) square[token] = fmaf(x[n][i], x[n][i], square[token]);
                const uint2 gain = gains.of[NORM ? (start + n) % MOST : 0];
                x[n][0] *= low(gain.x), x[n][1] *= high(gain.x), x[n][2] *= low(gain.y), x[n][3] *= high(gain.y);
            }
        }
        store_rounded<MOST, BATCH>(me, x, start, groups);
    }
    if (NORM) {
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
#pragma unroll
            for (int n = 0; n < NT; n++) square[n] += __shfl_xor_sync(FULL, square[n], d);
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
            if (me.lane == 0) squares[me.warp * NT + n] = square[n];
    }
    __syncwarp();
}

// The warp's groups of what comes before down, which is bytes already.
__device__ __forceinline__ void take_bytes(const Lane& me, const Arguments& a, u32 flag, int begin, int groups) {
    constexpr int ITEMS = ((GROUPS_I + WARPS - 1) / WARPS + 3) / 4;  // of 256 columns
    __syncwarp();  // the bytes of the phase before have been read
#pragma unroll 1
    for (int token = 0; token < NT; token++) {
        const u64* factors = a.words + PK_FACTOR + token * (INTER / 32) + begin * 2;
        for (int n = me.lane; n < groups * 2; n += 32)
            *(u32*)(me.fac + (n / 2 * NT + token) * 8 + n % 2 * 4) = wait_one(factors + n, flag);
        __syncwarp();
        const u64* words = a.words + PK_GATED + token * (INTER / 4) + begin * 16;
        Two found[ITEMS];
#pragma unroll
        for (int n = 0; n < ITEMS; n++) {
            found[n] = Two{0, flag, 0, flag};
            if (n * 256 + me.lane * 8 < groups * 64) found[n] = read_two(words + n * 64 + me.lane * 2);
        }
        bool all = false;
        [[maybe_unused]] u32 tries = 0;
        while (!all) {
            TRY(tries);
            all = true;
#pragma unroll
            for (int n = 0; n < ITEMS; n++)
                if (!found[n].there(flag)) found[n] = read_two(words + n * 64 + me.lane * 2), all = false;
        }
#pragma unroll
        for (int n = 0; n < ITEMS; n++) {
            int column = n * 256 + me.lane * 8, c = column % 64;
            if (column < groups * 64)
                *(uint2*)(me.act + (column / 64 * NT + token) * 64 + c % 32 / 8 * 16 + c / 32 * 8) = make_uint2(found[n].a, found[n].b);
        }
    }
    __syncwarp();
}

// ---- attention -------------------------------------------------------------------------------------------------
__device__ __forceinline__ int key_tiles(int length) { return (length + 6) / 8; }  // of 8 cached keys

// Into how many parts the keys of a request are split.
__device__ __forceinline__ int splits_of(int length) {
    int wanted = (key_tiles(length) + WARPS - 1) / WARPS;
    if (wanted <= 1) return 1;
    if (DIRECT > 1 && wanted <= DIRECT * 4) return wanted < DIRECT ? wanted : DIRECT;
    if (DIRECT <= 1) wanted = (wanted + 1) / 2;
    return wanted < SPLITS ? wanted : SPLITS;
}

// Four columns of what a token's parts of attention add up to. Reads splits `from`, `from + step`, ...
struct Added {
    float x[4], best, weight;
};
template <int COUNT>
__device__ __forceinline__ void add_parts(
    Added& all, const u64* parts, const u64* sums, u32 flag, int token, int column, int from, int step, int splits
) {
    Two found[COUNT];
    u64 sum[COUNT];
    int head = column / DIM;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        int split = from + n * step;
        found[n] = Two{0, flag, 0, flag}, sum[n] = u64(flag) << 32 | 0xff800000u;
        if (split < splits) {
            found[n] = read_two(parts + ((token * SPLITS + split) * HEADS_OUT + column) / 2);
            sum[n] = read_one(sums + (token * SPLITS + split) * QH + head);
        }
    }
    bool ready = false;
    [[maybe_unused]] u32 tries = 0;
    while (!ready) {
        TRY(tries);
        ready = true;
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            int split = from + n * step;
            if (!found[n].there(flag)) {
                found[n] = read_two(parts + ((token * SPLITS + split) * HEADS_OUT + column) / 2), ready = false;
            }
            if (u32(sum[n] >> 32) != flag) sum[n] = read_one(sums + (token * SPLITS + split) * QH + head), ready = false;
        }
    }
    float best = all.best;
#pragma unroll
    for (int n = 0; n < COUNT; n++) best = fmaxf(best, __uint_as_float(u32(sum[n])));
    float before = best == -INFINITY ? 1.f : exp2_fast(all.best - best);
#pragma unroll
    for (int i = 0; i < 4; i++) all.x[i] *= before;
    all.weight *= before, all.best = best;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        float log = __uint_as_float(u32(sum[n])), share = log == -INFINITY ? 0.f : exp2_fast(log - best);
        all.weight += share;
        all.x[0] = fmaf(share, low(found[n].a), all.x[0]), all.x[1] = fmaf(share, high(found[n].a), all.x[1]);
        all.x[2] = fmaf(share, low(found[n].b), all.x[2]), all.x[3] = fmaf(share, high(found[n].b), all.x[3]);
    }
}

// The warp's groups of attention as bytes, where readers add up the parts of a request themselves.
__device__ __forceinline__ void take_parts(
    const Lane& me, const Arguments& a, u32 flag, int begin, int groups
) {
    constexpr int MOST = ((GROUPS_O + WARPS - 1) / WARPS + 1) / 2;
    __syncwarp();
    for (int token = 0; token < NT; token++) {
        int splits = splits_of(a.lengths[token]);
        Added found[MOST];
#pragma unroll
        for (int n = 0; n < MOST; n++) {
            int column = n * 128 + me.lane * 4;
            found[n] = Added{{0.f, 0.f, 0.f, 0.f}, -INFINITY, 0.f};
            if (column < groups * 64) {
                int at = begin * 64 + column;
                // Who waits asks for one word in a lane, not for all.
                if (PROBE && DIRECT > 1 && splits > 1) wait_one(a.words + PK_PART + (token * SPLITS * HEADS_OUT + at) / 2, flag);
                if (DIRECT > 1 && splits > 1)
                    add_parts<DIRECT>(found[n], a.words + PK_PART, a.words + PK_LSE, flag, token, at, 0, 1, splits);
                else
                    add_parts<1>(found[n], a.words + PK_PART, a.words + PK_LSE, flag, token, at, 0, 1, 1);
            }
        }
        __syncwarp();
        float x[MOST][4];
#pragma unroll
        for (int n = 0; n < MOST; n++) {
            float inverse = found[n].weight > 0.f ? __fdividef(1.f, found[n].weight) : 0.f;
#pragma unroll
            for (int i = 0; i < 4; i++) x[n][i] = found[n].x[i] * inverse;
        }
        store_rounded<MOST, MOST>(me, x, token * MOST, groups);
    }
    __syncwarp();
}

// Adds up parts for readers: a warp takes 32 columns of a token, eight lanes of four, and four lanes share the splits.
__device__ __forceinline__ void add_up(const Lane& me, const Arguments& a, u32 flag, u32 block) {
    constexpr int ITEMS = HEADS_OUT / 32;
    for (int item = me.warp * NB + block; item < NT * ITEMS; item += NB * WARPS) {
        int token = item / ITEMS, column = item % ITEMS * 32 + (me.lane & 7) * 4, splits = splits_of(a.lengths[token]);
        Added found = {{0.f, 0.f, 0.f, 0.f}, -INFINITY, 0.f};
        for (int from = me.lane / 8; from < (splits + 3) / 4 * 4; from += 16)
            add_parts<4>(found, a.words + PK_PART, a.words + PK_LSE, flag, token, column, from, 4, splits);
        __syncwarp();
#pragma unroll
        for (int d = 8; d < 32; d *= 2) {
            float other = __shfl_xor_sync(FULL, found.best, d), best = fmaxf(found.best, other);
            float mine = found.best == -INFINITY ? 0.f : exp2_fast(found.best - best);
            float its = other == -INFINITY ? 0.f : exp2_fast(other - best);
            found.best = best;
            found.weight = found.weight * mine + __shfl_xor_sync(FULL, found.weight, d) * its;
#pragma unroll
            for (int i = 0; i < 4; i++) found.x[i] = found.x[i] * mine + __shfl_xor_sync(FULL, found.x[i], d) * its;
        }
        if (me.lane < 8) {
            float inverse = found.weight > 0.f ? __fdividef(1.f, found.weight) : 0.f;
            u64* to = a.words + PK_ATT + (token * HEADS_OUT + column) / 2;
            tell(to, pack(found.x[0] * inverse, found.x[1] * inverse), flag);
            tell(to + 1, pack(found.x[2] * inverse, found.x[3] * inverse), flag);
        }
    }
}

struct Keys {
    uint4 key[DIM / 32];       // of key `row`, a quarter
    uint4 value[DIM / 64][2];  // of keys 2 * pair and 2 * pair + 1, an eighth of every 64 dimensions
    int valid;                 // keys
};

// What a block attends to: one request, one head of keys, one split. The same in every layer.
struct Unit {
    int token, head, split, splits, length;  // token: -1 for none
    int tile, step, tiles;                   // the warp's first tile of 8 keys, from one to the next, and of the request
    long long place;                         // of key `row` of the first tile, in elements of a layer's cache
};

// Where key `row` of a tile is.
__device__ __forceinline__ long long place_of(const Lane& me, const Arguments& a, const Unit& unit, int tile) {
    int at = min(tile * 8 + int(me.row), unit.length - 2);
    int block = a.table[unit.token * a.table_row + at / PAGE];
    return block * a.cache_block + at % PAGE * a.cache_token + unit.head * a.cache_head;
}

__device__ __forceinline__ Unit unit_of(const Lane& me, const Arguments& a, int block) {
    Unit unit;
    unit.token = -1, unit.tile = unit.tiles = 0;
    int before = 0;
#pragma unroll 1
    for (int token = 0; token < NT; token++) {
        int length = a.lengths[token], splits = splits_of(length), mine = block - before;
        if (mine >= 0 && mine < splits * KVH) {
            unit.token = token, unit.head = mine / splits, unit.split = mine % splits;
            unit.splits = splits, unit.length = length, unit.tiles = key_tiles(length);
            unit.tile = unit.split * WARPS + me.warp, unit.step = splits * WARPS;
        }
        before += splits * KVH;
    }
    unit.place = unit.tile < unit.tiles ? place_of(me, a, unit, unit.tile) : 0;
    return unit;
}

// Asks for the keys and values of a layer long before they are read: a miss waits behind all weights on their way.
__device__ __forceinline__ void ask_for_keys(const Lane& me, const Arguments& a, const Unit& unit, int layer) {
    const int lines = DIM / 64;  // of 128 bytes, of a key; as many are its value's
    int line = me.lane & 3;
    if (line >= 2 * lines) return;
    const u16* cache = (const u16*)a.caches[layer] + (line < lines ? 0 : a.cache_value) + line % lines * 64;
    for (int tile = unit.tile; tile < unit.tiles; tile += unit.step) {
        long long place = tile == unit.tile ? unit.place : place_of(me, a, unit, tile);
        asm volatile("prefetch.global.L2 [%0];" ::"l"(cache + place));
    }
}

// Eight cached keys. Lane (row, pair) reads a quarter of key `row`, which is at `place`, and DPL dimensions of all values.
__device__ __forceinline__ void read_keys(
    Keys& keys, const Lane& me, const Arguments& a, const u16* cache, long long place, int valid
) {
    keys.valid = min(8, valid);
    const u16* key = cache + place + (me.lane & 3) * 8;
#pragma unroll
    for (int n = 0; n < DIM / 32; n++) keys.key[n] = *(const uint4*)(key + n * 32);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const u16* value = cache + __shfl_sync(FULL, place, (me.lane & 3) * 8 + k * 4) + a.cache_value + me.row * 8;
#pragma unroll
        for (int n = 0; n < DIM / 64; n++) keys.value[n][k] = *(const uint4*)(value + n * 64);
    }
}

struct Attended {
    // Values added up: tile e has dimension 8 * row + e, and that + 64, of heads 2 * pair and 2 * pair + 1; with 64
    // dimensions, 8 * row + 2e and 8 * row + 2e + 1.
    float sums[DIM / 16][4], best, weight;  // best, weight: of head `row`
};

__device__ __forceinline__ u32 word_of(const uint4& four, int n) {
    return n == 0 ? four.x : n == 1 ? four.y : n == 2 ? four.z : four.w;
}

__device__ __forceinline__ void attend_to(Attended& found, const Keys& keys, const uint4* query, const Lane& me, float scale) {
    float chains[2][4] = {};
#pragma unroll
    for (int n = 0; n < DIM / 32; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 a0 = half ? query[n].z : query[n].x, a2 = half ? query[n].w : query[n].y;
            u32 b0 = half ? keys.key[n].z : keys.key[n].x, b1 = half ? keys.key[n].w : keys.key[n].y;
            float* c = chains[half];
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
        }
    }
    int key = (me.lane & 3) * 2;
    float first = key < keys.valid ? (chains[0][0] + chains[1][0]) * scale : -INFINITY;
    float second = key + 1 < keys.valid ? (chains[0][1] + chains[1][1]) * scale : -INFINITY;
    float best = fmaxf(first, second);
    best = fmaxf(best, __shfl_xor_sync(FULL, best, 1));
    best = fmaxf(fmaxf(best, __shfl_xor_sync(FULL, best, 2)), found.best);
    float before = exp2_fast(found.best - best);
    first = exp2_fast(first - best), second = exp2_fast(second - best);
    float total = first + second;
    total += __shfl_xor_sync(FULL, total, 1);
    total += __shfl_xor_sync(FULL, total, 2);
    found.weight = found.weight * before + total, found.best = best;
    const u32 shares = pack(first, second);
    const float old = __shfl_sync(FULL, before, key * 4), other = __shfl_sync(FULL, before, key * 4 + 4);
#pragma unroll
    for (int e = 0; e < DIM / 16; e++) {
        float* c = found.sums[e];
        c[0] *= old, c[1] *= other, c[2] *= old, c[3] *= other;
        u32 a[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int part = DIM == 128 ? n : 0, which = DIM == 128 ? e : 2 * e + n;
            a[n] = __byte_perm(word_of(keys.value[part][0], which / 2), word_of(keys.value[part][1], which / 2),
                               which & 1 ? 0x7632 : 0x5410);
        }
        asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(shares));
    }
}

// The sums of a warp, [GROUP_HEADS][DIM].
__device__ __forceinline__ void put_attended(const Attended& found, const Lane& me, float* to) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
        int head = (me.lane & 3) * 2 + n;
        if (head < GROUP_HEADS) {
#pragma unroll
            for (int part = 0; part < DIM / 64; part++) {
                float x[8];
#pragma unroll
                for (int e = 0; e < 8; e++) x[e] = DIM == 128 ? found.sums[e][part * 2 + n] : found.sums[e / 2][e % 2 * 2 + n];
                float4* place = (float4*)(to + head * DIM + part * 64 + me.row * 8);
                place[0] = make_float4(x[0], x[1], x[2], x[3]), place[1] = make_float4(x[4], x[5], x[6], x[7]);
            }
        }
    }
}

// One head of the new token by one warp: waits for it, norms it, turns it. part: 0 query, 1 key, 2 value.
// turn: [DIM] cosines, then sines.
__device__ __forceinline__ void take_head(
    const Lane& me, const Arguments& a, u32 flag, int layer, int token, int number, int part, const float* turn, u16* to,
    u16* cached
) {
    constexpr int PAIRS = DIM / 4;  // of columns, in half a head
    bool here = me.lane < PAIRS;
    int i = here ? me.lane : 0;
    const u64* words = a.words + PK_QKV + token * QKV / 2 + number * DIM / 2;
    float2 cosines = make_float2(1.f, 1.f), sines = make_float2(0.f, 0.f);
    if (part < 2) cosines = *(const float2*)(turn + 2 * i), sines = *(const float2*)(turn + 2 * i + DIM / 2);
    const float cosine[2] = {cosines.x, cosines.y}, sine[2] = {sines.x, sines.y};
    u32 one, two;
    wait_both(words + i, words + PAIRS + i, flag, one, two);
    __syncwarp();
    float x[2] = {low(one), high(one)}, y[2] = {low(two), high(two)};
#if QKNORM
    if (part < 2) {
        float square = here ? x[0] * x[0] + x[1] * x[1] + y[0] * y[0] + y[1] * y[1] : 0.f;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) square += __shfl_xor_sync(FULL, square, d);
        float factor = rsqrtf(square / DIM + EPSILON);
        const u16* weight = a.head_norms + (layer * 2 + part) * DIM + 2 * i;
#pragma unroll
        for (int n = 0; n < 2; n++) x[n] *= factor * plain(weight[n]), y[n] *= factor * plain(weight[n + DIM / 2]);
    }
#endif
    u32 first = pack(x[0] * cosine[0] - y[0] * sine[0], x[1] * cosine[1] - y[1] * sine[1]);
    u32 second = pack(y[0] * cosine[0] + x[0] * sine[0], y[1] * cosine[1] + x[1] * sine[1]);
    if (here) {
        *(u32*)(to + 2 * i) = first, *(u32*)(to + 2 * i + DIM / 2) = second;
        if (cached) *(u32*)(cached + 2 * i) = first, *(u32*)(cached + 2 * i + DIM / 2) = second;
    }
}

// A unit, by all warps of the block.
__device__ __forceinline__ void attend(
    const Lane& me, const Arguments& a, const Unit& unit, u32 flag, int layer, long long slot, char* shared, float* sums
) {
    const int token = unit.token, head = unit.head, split = unit.split, length = unit.length;
    const u16* cache = (const u16*)a.caches[layer];
    int tile = unit.tile;
    Keys keys;
    if (tile < unit.tiles) read_keys(keys, me, a, cache, unit.place, length - 1 - tile * 8);
    u16 *queries = (u16*)(shared + AT_QUERY), *fresh = (u16*)(shared + AT_NEW);
    const float* turn = (const float*)(shared + AT_ROPE) + token * DIM;
    for (int n = me.warp; n < GROUP_HEADS + 2; n += WARPS) {
        int part = n < GROUP_HEADS ? 0 : n - GROUP_HEADS + 1;
        int number = part == 0 ? head * GROUP_HEADS + n : QH + (part - 1) * KVH + head;
        u16* to = part == 0 ? queries + n * (DIM + 8) : fresh + (part - 1) * DIM;
        bool writes = part > 0 && split == 0 && slot >= 0;
        u16* cached_at = writes ? (u16*)cache + slot + (part - 1) * a.cache_value : (u16*)0;
        take_head(me, a, flag, layer, token, number, part, turn, to, cached_at);
    }
    __syncthreads();
    uint4 query[DIM / 32];
#pragma unroll
    for (int n = 0; n < DIM / 32; n++)
        query[n] = me.row < GROUP_HEADS ? *(const uint4*)(queries + me.row * (DIM + 8) + n * 32 + (me.lane & 3) * 8)
                                        : make_uint4(0, 0, 0, 0);
    Attended found = {};
    found.best = -INFINITY;
    // The warp that most likely has no other key takes the newest, too.
    bool newest = split == unit.splits - 1 && me.warp == WARPS - 1 && length > 0;
#pragma unroll 1
    while (newest || tile < unit.tiles) {
        const bool cached = tile < unit.tiles;
        if (!cached) {
            newest = false;
#pragma unroll
            for (int n = 0; n < DIM / 32; n++)
                keys.key[n] = me.row == 0 ? *(const uint4*)(fresh + n * 32 + (me.lane & 3) * 8) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int n = 0; n < DIM / 64; n++) {
                keys.value[n][1] = make_uint4(0, 0, 0, 0), keys.value[n][0] = make_uint4(0, 0, 0, 0);
                if ((me.lane & 3) == 0) keys.value[n][0] = *(const uint4*)(fresh + DIM + n * 64 + me.row * 8);
            }
            keys.valid = 1;
        }
        attend_to(found, keys, query, me, a.scale);
        if (cached) tile += unit.step;
        if (tile < unit.tiles) read_keys(keys, me, a, cache, place_of(me, a, unit, tile), length - 1 - tile * 8);
    }
    float* stats = sums + WARPS * GROUP_HEADS * DIM;  // [WARPS][GROUP_HEADS][2]
    put_attended(found, me, sums + me.warp * GROUP_HEADS * DIM);
    if ((me.lane & 3) == 0 && me.row < GROUP_HEADS) {
        stats[(me.warp * GROUP_HEADS + me.row) * 2] = found.best;
        stats[(me.warp * GROUP_HEADS + me.row) * 2 + 1] = found.weight;
    }
    __syncthreads();
    for (int n = me.warp * 32 + me.lane; n < GROUP_HEADS * DIM / 2; n += THREADS) {
        int which = n / (DIM / 2), d = n % (DIM / 2) * 2;
        float best = -INFINITY, weight = 0.f, x = 0.f, y = 0.f;
#pragma unroll 4
        for (int w = 0; w < WARPS; w++) best = fmaxf(best, stats[(w * GROUP_HEADS + which) * 2]);
#pragma unroll 4
        for (int w = 0; w < WARPS; w++) {
            float its = stats[(w * GROUP_HEADS + which) * 2], share = its == -INFINITY ? 0.f : exp2_fast(its - best);
            float2 sum = *(const float2*)(sums + (w * GROUP_HEADS + which) * DIM + d);
            weight = fmaf(stats[(w * GROUP_HEADS + which) * 2 + 1], share, weight);
            x = fmaf(sum.x, share, x), y = fmaf(sum.y, share, y);
        }
        float inverse = weight > 0.f ? __fdividef(1.f, weight) : 0.f;
        int number = head * GROUP_HEADS + which, part = token * SPLITS + split;
        tell(a.words + PK_PART + (part * HEADS_OUT + number * DIM + d) / 2, pack(x * inverse, y * inverse), flag);
        if (d == 0)  // a closed request attends to nothing: its result is 0, and it has one part
            tell(a.words + PK_LSE + part * QH + number, __float_as_uint(weight > 0.f ? best + __log2f(weight) : 0.f), flag);
    }
    __syncthreads();  // the next product writes where these sums were
}

// ---- the trunk -------------------------------------------------------------------------------------------------
__device__ __forceinline__ float2 added(const float* sums, int tiles, int tile, int token, int row) {
    float2 all = make_float2(0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        float2 some = *(const float2*)(sums + ((w * tiles + tile) * NT + token) * 16 + row);
        all.x += some.x, all.y += some.y;
    }
    return all;
}

__device__ __forceinline__ float norm_factor(const float* squares, int token) {
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all += squares[w * NT + token];
    return rsqrtf(all / HIDDEN + EPSILON);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) draft_trunk(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) char shared[];
    const u32 block = blockIdx.x, thread = threadIdx.x;
    Lane me;
    me.warp = thread / 32, me.lane = thread % 32, me.row = me.lane / 4, me.pair = (me.lane & 3) < NT ? (me.lane & 3) : 0;
    me.act = shared + AT_ACT + me.warp * ACT_WARP, me.fac = shared + AT_FAC + me.warp * FAC_WARP;
    const int* plan = a.plan + block * 6;
    const int q0 = plan[0], qn = plan[1], o0 = plan[2], on = plan[3], g0 = plan[4], gn = plan[5];
    const int part = me.warp ^ (me.warp / 4 & 1);  // uneven shares alternate; every scheduler gets some of both
    const int h0 = GROUPS_H * part / WARPS, hn = GROUPS_H * (part + 1) / WARPS - h0;
    const int c0 = GROUPS_O * part / WARPS, cn = GROUPS_O * (part + 1) / WARPS - c0;
    const int i0 = GROUPS_I * part / WARPS, in = GROUPS_I * (part + 1) / WARPS - i0;
    const u32 base = *(volatile u32*)a.launches * (LAYERS + 1);
    const char* stream = a.stream + a.offsets[block * WARPS + me.warp];
    // All that is read from memory by single loads comes first: it would wait behind the weights.
    float* residual = (float*)(shared + AT_RESIDUAL);  // [on][NT][16]
#pragma unroll 1
    for (int n = thread; n < on * 8 * NT; n += THREADS) {
        int tile = n / (8 * NT), token = n / 8 % NT, row = n % 8 * 2;
        u32 pair = *(const u32*)(a.embedding + (long long)a.ids[token] * HIDDEN + (o0 + tile) * 16 + row);
        residual[(tile * NT + token) * 16 + row] = low(pair), residual[(tile * NT + token) * 16 + row + 1] = high(pair);
        tell(a.words + PK_X + (token * HIDDEN + (o0 + tile) * 16 + row) / 2, pair, base);
    }
    bool direct = true;  // readers add up the parts of attention themselves
#pragma unroll
    for (int n = 0; n < NT; n++) direct &= splits_of(a.lengths[n]) <= DIRECT;
    const Unit unit = unit_of(me, a, block);
    long long slot = unit.token < 0 ? -1 : a.slots[unit.token];
    if (slot >= 0) slot = slot / PAGE * a.cache_block + slot % PAGE * a.cache_token + unit.head * a.cache_head;
    if (unit.token >= 0 && unit.length == 0) slot = -1;
#pragma unroll 1
    for (int n = thread; n < NT * DIM; n += THREADS) {
        long long at = a.positions[n / DIM] * DIM + n % DIM;
#if ROPE_FLOAT
        ((float*)(shared + AT_ROPE))[n] = ((const float*)a.rope)[at];
#else
        ((float*)(shared + AT_ROPE))[n] = plain(((const u16*)a.rope)[at]);
#endif
    }
    Gains gains, others;  // of the norm that is next, and of the one behind it
    gains.read(me, a.norms, h0, hn), others.read(me, a.norms + HIDDEN, h0, hn);
#if BIAS
    u32 bias = 0;  // of the layer that is next, for this thread's first rows
    const bool biased = thread < qn * 8 * NT;
    const u16* bias_at = a.bias + (q0 + thread / (8 * NT)) * 16 + thread % 8 * 2;
    if (biased) bias = *(const u32*)bias_at;
#endif
    if (unit.token >= 0) ask_for_keys(me, a, unit, 0);
    u16* sizes = (u16*)(shared + AT_SIZES) + me.warp * CHUNKS;
    u16* behind = sizes_of(sizes_of(sizes_of(sizes_of(sizes, qn, hn), on, cn), gn, hn), on, in);
    __syncthreads();
    Ring ring;
    ring.begin(stream, sizes, behind - sizes, shared + me.warp * SLOTS * CHUNK,
               address(shared + AT_BARRIERS) + me.warp * SLOTS * 8, me.lane);
    float *sums = (float*)(shared + AT_SUMS), *more_sums = sums + WARPS * TILES * NT * 16;
    float* squares = (float*)(shared + AT_SQUARES);
#ifdef PROFILE
    u32 spent[16] = {}, last = clock();
#endif
    for (int layer = 0; layer < LAYERS; layer++) {
        const u32 flag = base + layer + 1;
        const bool ends = layer == LAYERS - 1;
#pragma unroll 1
        for (int phase = 0; phase < 4; phase++) {
            // ---- what the product reads
            if (phase == 0 || phase == 2) {
                const u64* words = a.words + (phase ? PK_MID : PK_X);
                take<HIDDEN, true>(me, words, phase ? flag : flag - 1, gains, h0, hn, squares);
                Gains used = others;  // those of the next layer are read now
                if (!ends) others.read(me, a.norms + ((layer + 1) * 2 + phase / 2) * HIDDEN, h0, hn);
                gains = used;
            } else if (phase == 3) {
                if (on > 0) take_bytes(me, a, flag, i0, in);
            } else {
                if (unit.token >= 0) {
                    attend(me, a, unit, flag, layer, slot, shared, sums);
                    if (!ends) ask_for_keys(me, a, unit, layer + 1);
                }
                if (direct) {
                    if (on > 0) take_parts(me, a, flag, c0, cn);
                } else {
                    add_up(me, a, flag, block);
                    if (on > 0) take<HEADS_OUT, false>(me, a.words + PK_ATT, flag, gains, c0, cn, squares);
                }
            }
            MARK(phase * 3);
            const int tiles = phase == 0 ? qn : phase == 2 ? gn : on, groups = phase == 1 ? cn : phase == 3 ? in : hn;
            float* sums_here = phase & 1 ? more_sums : sums;
            product(ring, me, tiles, groups, sums_here + me.warp * tiles * NT * 16);
            MARK(phase * 3 + 1);
            __syncthreads();
            // ---- what becomes of it
            if (phase == 0) {  // queries, keys, values
                for (int n = thread; n < qn * 8 * NT; n += THREADS) {
                    int tile = n / (8 * NT), token = n / 8 % NT, row = n % 8 * 2, out = (q0 + tile) * 16 + row;
                    float factor = norm_factor(squares, token);
                    float2 x = added(sums, qn, tile, token, row);
                    x.x *= factor, x.y *= factor;
#if BIAS
                    u32 some = n == thread ? bias : *(const u32*)(a.bias + layer * QKV + out);
                    x.x += low(some), x.y += high(some);
#endif
                    tell(a.words + PK_QKV + (token * QKV + out) / 2, pack(x.x, x.y), flag);
                }
#if BIAS
                if (biased && !ends) bias = *(const u32*)(bias_at + (layer + 1) * QKV);
#endif
            } else if (phase == 2) {  // rows 0 to 7 of a tile are gates, the others what they gate
                // Sixteen lanes have 32 columns of a token, two each, and round them together.
                for (int n = thread; n < gn * 4 * NT; n += THREADS) {
                    int four = n / (16 * NT) * 4, token = n / 16 % NT, tile = four + n % 16 / 4, row = n % 4 * 2;
                    float factor = norm_factor(squares, token);
                    float2 gate = added(sums, gn, tile, token, row), up = added(sums, gn, tile, token, row + 8);
                    gate.x *= factor, gate.y *= factor, up.x *= factor, up.y *= factor;
                    float x = __fdividef(gate.x, 1.f + exp2_fast(-LOG2E * gate.x)) * up.x;
                    float y = __fdividef(gate.y, 1.f + exp2_fast(-LOG2E * gate.y)) * up.y;
                    const u32 lanes = 0xffffu << (thread & 16);
                    float most = fmaxf(fabsf(x), fabsf(y));
#pragma unroll
                    for (int d = 1; d < 16; d *= 2) most = fmaxf(most, __shfl_xor_sync(lanes, most, d));
                    const float magic = 12582912.f, inverse = most > 0.f ? __fdividef(127.f, most) : 0.f;
                    u32 pair = __byte_perm(__float_as_uint(fmaf(x, inverse, magic)), __float_as_uint(fmaf(y, inverse, magic)), 0x40);
                    pair = __byte_perm(pair, __shfl_xor_sync(lanes, pair, 1), 0x5410);
                    int column = (g0 + tile) * 8 + row;
                    if (!(n & 1)) tell(a.words + PK_GATED + (token * INTER + column) / 4, pair, flag);
                    if (n % 16 == 0) tell(a.words + PK_FACTOR + (token * INTER + column) / 32, __float_as_uint(most * (1.f / (127.f * 16.f))), flag);
                }
            } else {  // added to the residual
                u64* to = a.words + (phase == 3 ? PK_X : PK_MID);
                for (int n = thread; n < on * 8 * NT; n += THREADS) {
                    int tile = n / (8 * NT), token = n / 8 % NT, row = n % 8 * 2;
                    float2 x = added(sums_here, on, tile, token, row);
                    float2* left = (float2*)(residual + (tile * NT + token) * 16 + row);
                    x.x += left->x, x.y += left->y, *left = x;
                    tell(to + (token * HIDDEN + (o0 + tile) * 16 + row) / 2, pack(x.x, x.y), flag);
                }
            }
            MARK(phase * 3 + 2);
        }
    }
#ifdef PROFILE
    if (thread == 0)
        for (int n = 0; n < 16; n++) a.profile[block * 16 + n] = spent[n];
#endif
    // ---- the last norm, a block for each token
    if (block < NT) {
        const u64* words = a.words + PK_X + block * HIDDEN / 2;
        float square = 0.f;
        __syncthreads();
        for (int n = thread; n < HIDDEN / 2; n += THREADS) {
            u32 pair = wait_one(words + n, base + LAYERS);
            square += low(pair) * low(pair) + high(pair) * high(pair);
        }
        __syncwarp();
        for (int d = 1; d < 32; d *= 2) square += __shfl_xor_sync(FULL, square, d);
        if (me.lane == 0) squares[me.warp * NT] = square;
        __syncthreads();
        float factor = norm_factor(squares, 0);
        for (int n = thread; n < HIDDEN / 2; n += THREADS) {
            u32 pair = wait_one(words + n, base + LAYERS), weight = *(const u32*)(a.final_norm + 2 * n);
            *(u32*)(a.out + block * HIDDEN + 2 * n) = pack(low(pair) * factor * low(weight), high(pair) * factor * high(weight));
        }
        // Every block has read the count long ago: the last layer needed something of each.
        if (block == 0 && thread == 0) *a.launches = *(volatile u32*)a.launches + 1;
    }
}
