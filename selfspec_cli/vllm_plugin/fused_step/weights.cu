// ---- a warp's stream of weights --------------------------------------------------------------------------------
// A chunk is at most RECORDS records of one phase. Every layer has the same chunks; their sizes are in shared memory.
struct Ring {
    const char* next;
    const u16* sizes;
    char* slots;
    u32 barriers, slot, parity, coming, chunks, left;  // coming: chunk of a layer that is requested next
    u64 policy;

    __device__ __forceinline__ void request(u32 to, u32 lane) {
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
        asm volatile(
            "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\n"
            "bra AGAIN;\nDONE:\n}" ::"r"(barriers + slot * 8), "r"(parity) : "memory");
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
