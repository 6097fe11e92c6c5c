// ---- a warp's weights ------------------------------------------------------------------------------------------
// A chunk is at most RECORDS neighbouring records of one phase. Every layer has the same chunks. They are listed in
// shared memory, as 8 times the number of a chunk's first record in a layer, plus how many it has.
struct Ring {
    const char* layer;  // records of the layer from which the next chunk is requested
    const u32* list;
    char* slots;
    u32 barriers, slot, parity, coming, chunks, left;  // coming: chunk of a layer that is requested next
    u64 policy;

    __device__ __forceinline__ void request(u32 to, u32 id) {
        if (left > 0) {
            if (id == 0) {
                const u32 chunk = list[coming], bytes = chunk % 8 * RECORD, barrier = barriers + to * 8;
                barrier_arrive_and_expect(barrier, bytes);
                copy_async(address(slots + to * CHUNK), layer + u64(chunk / 8) * RECORD, bytes, barrier, policy);
            }
            left--;
            if (++coming == chunks) coming = 0, layer += LAYER_BYTES;
        }
    }
    __device__ __forceinline__ void begin(
        const char* weights, const u32* chunks_of_layer, u32 count, char* where, u32 barrier, u32 id
    ) {
        layer = weights, list = chunks_of_layer, chunks = count, left = count * LAYERS, slots = where, barriers = barrier;
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

// at: a group's factors, from the lane's first token on.
__device__ __forceinline__ Factors factors_at(const char* at) {
    Factors factors;
    if (LANE_TOKENS == 1) {
        factors.of[0] = *(const float2*)at;
    } else {
        float4 both = *(const float4*)at;
        factors.of[0] = make_float2(both.x, both.y), factors.of[LANE_TOKENS - 1] = make_float2(both.z, both.w);
    }
    return factors;
}

// What a lane multiplies of a record.
struct Record {
    uint4 words;
    u32 scales;  // of rows `row` and `row + 8`, in half precision
};
__device__ __forceinline__ Record record_at(const Lane& lane, const char* at) {
    return {*(const uint4*)(at + lane.id * 16), *(const u32*)(at + 512 + lane.row * 4)};
}

// -8 times the sum of a group's first 32 columns, for each of the lane's tokens: these weights are stored with 8 added.
struct Offsets {
    int of[4];  // where a product has its sums
};
__device__ __forceinline__ Offsets offsets_of(uint4 tokens) {
    const u32 minus_8 = 0xf8f8f8f8u;  // in each byte
    Offsets offsets;
    multiply(offsets.of, minus_8, minus_8, minus_8, minus_8, tokens.x, tokens.y);
    return offsets;
}

// Adds a record's products to a tile's sums, if `here`.
__device__ __forceinline__ void add_products(
    Sums& sums, const Record& record, uint4 tokens, const Offsets& offsets, const Factors& factors, bool here
) {
    const u32 M = 0xf0f0f0f0u;
    const uint4 w = record.words;
    int first[4], second[4];
    multiply_add(first, w.x & ~M, w.y & ~M, w.z & ~M, w.w & ~M, tokens.x, tokens.y, offsets.of);
    multiply(second, w.x & M, w.y & M, w.z & M, w.w & M, tokens.z, tokens.w);
#pragma unroll
    for (int t = 0; t < LANE_TOKENS; t++) {
        float2 factor = factors.of[t];
        float above = fmaf(float(first[t]), factor.x, float(second[t]) * factor.y);
        float below = fmaf(float(first[2 + t]), factor.x, float(second[2 + t]) * factor.y);
        if (here) {
            sums.above[t] = fmaf(half_to_float(record.scales & 0xffff), above, sums.above[t]);
            sums.below[t] = fmaf(half_to_float(record.scales >> 16), below, sums.below[t]);
        }
    }
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

// From a group's tokens to the next group's, in bytes, and from its factors to the next ones.
#define GROUP_BYTES (EVEN_NT * 64)
#define GROUP_FACTORS (EVEN_NT * 8)

// COUNT groups of one tile. `left` of them exist, at least SURE. Reads the others as well, which are other data in shared
// memory, but leaves their products out, so there is no branch for each group.
template <int COUNT, int SURE>
__device__ __forceinline__ void add_groups(
    Sums& sums, const Lane& lane, const char* chunk, const char* bytes, const char* factors, int left
) {
    Record records[COUNT];
    uint4 tokens[COUNT];
    Factors factor[COUNT];
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        records[n] = record_at(lane, chunk + n * RECORD), tokens[n] = *(const uint4*)(bytes + n * GROUP_BYTES);
        factor[n] = factors_at(factors + n * GROUP_FACTORS);
    }
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        add_products(sums, records[n], tokens[n], offsets_of(tokens[n]), factor[n], n < SURE || n < left);
    }
}

// The warp's share of the columns of `tiles` tiles, into sums [tiles][TILE_SUMS]. A chunk is up to RECORDS groups of a tile.
__device__ __forceinline__ void product(Ring& ring, const Lane& lane, int tiles, int groups, float* to) {
#pragma unroll 1
    for (; tiles > 0; tiles--, to += TILE_SUMS) {
        const char *bytes = lane.bytes + lane.column, *factors = lane.factors + lane.token_group * LANE_TOKENS * 8;
        Sums sums = {};
#pragma unroll 1
        for (int left = groups; left > 0; left -= RECORDS) {
            const char* chunk = ring.chunk();
            if (RECORDS > 2 && left > 2) add_groups<RECORDS, 3>(sums, lane, chunk, bytes, factors, left);
            else add_groups<2, 1>(sums, lane, chunk, bytes, factors, left);
            ring.used(lane.id);
            bytes += RECORDS * GROUP_BYTES, factors += RECORDS * GROUP_FACTORS;
        }
        store_sums(lane, to, sums);
    }
}

// The same for strips of STRIP tiles, group by group, so that a group's tokens are read once for the tiles of a strip.
__device__ __forceinline__ void product_of_strips(Ring& ring, const Lane& lane, int tiles, int groups, float* to) {
#pragma unroll 1
    for (; tiles > 0; tiles -= STRIP, to += STRIP * TILE_SUMS) {
        const char *bytes = lane.bytes + lane.column, *factors = lane.factors + lane.token_group * LANE_TOKENS * 8;
        Sums sums[STRIP] = {};
#pragma unroll 1
        for (int left = groups; left > 0; left--, bytes += GROUP_BYTES, factors += GROUP_FACTORS) {
            const uint4 tokens = *(const uint4*)bytes;
            const Factors factor = factors_at(factors);
            const Offsets offsets = offsets_of(tokens);
#pragma unroll
            for (int part = 0; part < STRIP; part += RECORDS) {
                const char* chunk = ring.chunk();
                Record records[RECORDS];
#pragma unroll
                for (int n = 0; n < RECORDS; n++) records[n] = record_at(lane, chunk + n * RECORD);
#pragma unroll
                for (int n = 0; n < RECORDS; n++) add_products(sums[part + n], records[n], tokens, offsets, factor, true);
                ring.used(lane.id);
            }
        }
#pragma unroll
        for (int n = 0; n < STRIP; n++) store_sums(lane, to + n * TILE_SUMS, sums[n]);
    }
}

// Lists chunks of a phase, in the order in which they are multiplied, and returns the list's end. first: the number in a
// layer of the product's first record; columns: groups of the product; tile, tiles: of the block; share: of the warp.
__device__ __forceinline__ u32* list_chunks(u32* to, int first, int columns, int tile, int tiles, const Share& share) {
    first += tile * columns + share.begin;
#pragma unroll 1
    for (; tiles > 0; tiles--, first += columns) {
#pragma unroll 1
        for (int n = 0; n < share.groups; n += RECORDS) *to++ = (first + n) * 8 + min(share.groups - n, RECORDS);
    }
    return to;
}
__device__ __forceinline__ u32* list_strips(u32* to, int first, int columns, int tile, int tiles, const Share& share) {
    first += tile * columns + share.begin * STRIP;
#pragma unroll 1
    for (; tiles > 0; tiles -= STRIP, first += STRIP * columns) {
#pragma unroll 1
        for (int n = 0; n < share.groups * STRIP; n += RECORDS) *to++ = (first + n) * 8 + RECORDS;
    }
    return to;
}
