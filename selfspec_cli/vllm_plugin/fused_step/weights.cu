// ---- a warp's stream of weights --------------------------------------------------------------------------------
// A chunk is at most RECORDS records of one phase. Every layer has the same chunks; their sizes are in shared memory.
struct Ring {
    const char* next;
    const u16* sizes;
    char* slots;
    u32 barriers, slot, parity, coming, chunks, left;  // coming: chunk of a layer that is requested next
    u64 policy;

    __device__ __forceinline__ void request(u32 to, u32 id) {
        if (left > 0) {
            u32 bytes = sizes[coming];
            if (id == 0) {
                u32 barrier = barriers + to * 8;
                barrier_arrive_and_expect(barrier, bytes);
                copy_async(address(slots + to * CHUNK), next, bytes, barrier, policy);
            }
            next += bytes, left--;
            if (++coming == chunks) coming = 0;
        }
    }
    __device__ __forceinline__ void begin(const char* from, const u16* layer, u32 count, char* where, u32 barrier, u32 id) {
        next = from, sizes = layer, chunks = count, left = count * LAYERS, slots = where, barriers = barrier;
        slot = parity = coming = 0, policy = read_once();
        if (id == 0) {
#pragma unroll 1
            for (u32 n = 0; n < SLOTS; n++) barrier_init(barriers + n * 8, 1);
            fence_barriers();
        }
        __syncwarp();
#pragma unroll 1
        for (u32 n = 0; n < SLOTS; n++) request(n, id);
    }
    // Where the next chunk is. It is there when this returns.
    __device__ __forceinline__ const char* chunk() {
        barrier_wait(barriers + slot * 8, parity);
        return slots + slot * CHUNK;
    }
    __device__ __forceinline__ void used(u32 id) {
        __syncwarp();
        request(slot, id);
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

struct Lane {
    u32 warp, id, row, token_group;  // row: of a tile; token_group: tokens whose sums the lane has
    u32 column;               // where its column of a product is among a group's bytes
    char *bytes, *factors;    // the warp's tokens [groups][EVEN_NT][64], and their factors [groups][EVEN_NT][2]
};

// A warp's groups of columns, of `groups`.
struct Share {
    int begin, groups;
};
__device__ __forceinline__ Share share_of(int groups, int warp) {
    const int part = warp ^ (warp / 4 & 1);  // uneven shares alternate; every scheduler gets some of both
    const int begin = groups * part / WARPS;
    return {begin, groups * (part + 1) / WARPS - begin};
}

struct Sums {
    float above[LANE_TOKENS], below[LANE_TOKENS];  // of rows `row` and `row + 8` of a tile
};
struct Factors {
    float2 of[LANE_TOKENS];  // of the two halves of a group
};

__device__ __forceinline__ Factors factors_of(const Lane& lane, int group) {
    const char* at = lane.factors + (group * EVEN_NT + lane.token_group * LANE_TOKENS) * 8;
    Factors factors;
    if (LANE_TOKENS == 1) {
        factors.of[0] = *(const float2*)at;
    } else {
        float4 both = *(const float4*)at;
        factors.of[0] = make_float2(both.x, both.y), factors.of[LANE_TOKENS - 1] = make_float2(both.z, both.w);
    }
    return factors;
}

__device__ __forceinline__ Sums multiply_record(uint4 w, u32 scales, uint4 tokens, const Factors& factors) {
    const u32 M = 0xf0f0f0f0u;
    int first[4], second[4];
    multiply(first, (w.x << 4) & M, (w.y << 4) & M, w.x & M, w.y & M, tokens.x, tokens.y);
    multiply(second, (w.z << 4) & M, (w.w << 4) & M, w.z & M, w.w & M, tokens.z, tokens.w);
    Sums sums;
#pragma unroll
    for (int t = 0; t < LANE_TOKENS; t++) {
        float2 factor = factors.of[t];
        float above = fmaf(float(first[t]), factor.x, float(second[t]) * factor.y);
        float below = fmaf(float(first[2 + t]), factor.x, float(second[2 + t]) * factor.y);
        sums.above[t] = half_to_float(scales & 0xffff) * above, sums.below[t] = half_to_float(scales >> 16) * below;
    }
    return sums;
}

// Where the sums of a tile's `row` are: [TOKEN_GROUPS][16 rows][LANE_TOKENS]. With two tokens the four groups of a warp
// would write to the same banks, so rows are exchanged by group; a row and the next one stay side by side.
__device__ __forceinline__ u32 place_of_sums(u32 token_group, u32 row) {
    return (token_group * 16 + (LANE_TOKENS == 1 ? row : row ^ (token_group * 4))) * LANE_TOKENS;
}
__device__ __forceinline__ void store_sums(const Lane& lane, float* tile, const Sums& sums) {
    if ((lane.id & 3) >= TOKEN_GROUPS) return;
    float* const above = tile + place_of_sums(lane.token_group, lane.row);
    float* const below = tile + place_of_sums(lane.token_group, lane.row + 8);
    if (LANE_TOKENS == 1) {
        *above = sums.above[0], *below = sums.below[0];
    } else {
        *(float2*)above = make_float2(sums.above[0], sums.above[LANE_TOKENS - 1]);
        *(float2*)below = make_float2(sums.below[0], sums.below[LANE_TOKENS - 1]);
    }
}

// Records of the next chunk: whole tiles, or a part of one.
__device__ __forceinline__ int records_of_chunk(int left, int group, int groups) {
    return groups <= RECORDS ? min(RECORDS / groups * groups, left) : min(RECORDS, groups - group);
}

// The warp's share of the columns of `tiles` tiles, into sums [tiles][TILE_SUMS]. One place in the kernel calls it, with
// one loop for all phases: code that is run once a layer waits for its instructions longer than for anything else.
__device__ __forceinline__ void product(Ring& ring, const Lane& lane, int tiles, int groups, float* to) {
    int left = tiles * groups, group = 0;
    Sums sums = {};
#pragma unroll 1
    while (left > 0) {
        const int count = records_of_chunk(left, group, groups);
        left -= count;
        const char* record = ring.chunk();
        uint4 weights[RECORDS], tokens[RECORDS];
        u32 scales[RECORDS];
        Factors factors[RECORDS];
        bool ends[RECORDS];
#pragma unroll
        for (int n = 0; n < RECORDS; n++) {
            const bool here = n < count;  // what is not there is another with scales of 0
            const char* at = record + (here ? n : 0) * RECORD;
            weights[n] = *(const uint4*)(at + lane.id * 16);
            scales[n] = here ? *(const u32*)(at + 512 + lane.row * 4) : 0;
            tokens[n] = *(const uint4*)(lane.bytes + group * EVEN_NT * 64 + lane.column);
            factors[n] = factors_of(lane, group);
            ends[n] = here && group + 1 == groups;
            group = !here ? group : ends[n] ? 0 : group + 1;
        }
        Sums each[RECORDS];
#pragma unroll
        for (int n = 0; n < RECORDS; n++) each[n] = multiply_record(weights[n], scales[n], tokens[n], factors[n]);
#pragma unroll
        for (int n = 0; n < RECORDS; n++) {
#pragma unroll
            for (int t = 0; t < LANE_TOKENS; t++) sums.above[t] += each[n].above[t], sums.below[t] += each[n].below[t];
            if (ends[n]) store_sums(lane, to, sums), sums = Sums{}, to += TILE_SUMS;
        }
        ring.used(lane.id);
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
