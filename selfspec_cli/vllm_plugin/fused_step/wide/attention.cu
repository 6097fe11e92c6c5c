// ---- attention of a block ------------------------------------------------------------------------------------------
// A run of cached keys, in tiles of eight, of one token and KV head. The same in every layer.
struct Item {
    long long slot;                           // where the new token's key goes, in elements of a layer's cache; -1: nowhere
    int token, head, first, tiles, length;    // first: tile; length: of the request with the new token
    int split, splits;                        // number of this item among those of its token and head
    int newest;                               // whether the new token's key is attended to here
    int number;                               // of the item among all
};
static_assert(sizeof(Item) == 48, "room for an item");

__device__ __forceinline__ int key_tiles(int length) { return (length + 6) / 8; }  // of cached keys
__device__ __forceinline__ int splits_of(int length, int longest) { return max(1, COUNT_OF(key_tiles(length), longest)); }

// Over all lanes of a warp.
__device__ __forceinline__ int add_lanes(int x) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) x += __shfl_xor_sync(FULL, x, d);
    return x;
}

// The block's items by one warp, whose lanes have a token or two each: number `block`, `block` + NB, ... of all items in
// the order of tokens, heads, keys. An item has the fewest tiles by which there are no more items than rounds of all
// blocks, but not fewer than one a warp, and all tiles of requests that are short: to add items up costs a hop, too. Gives
// the number of the block's items.
__device__ __forceinline__ int list_items(const Arguments& a, const Lane& lane, int block, Item* items) {
    constexpr int EACH = COUNT_OF(TOKENS, 32);  // tokens of a lane
    const int room = COUNT_OF(a.tokens * KVH, NB) * NB / KVH;  // items of one head
    int lengths[EACH], longest = 0;
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const int token = lane.id * EACH + n;
        lengths[n] = token < a.tokens ? a.lengths[token] : -1;
        longest = max(longest, key_tiles(lengths[n]));
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) longest = max(longest, __shfl_xor_sync(FULL, longest, d));
    int fewest = longest > 3 * WARPS ? WARPS : max(longest, 1), most = max(longest, 1);
#pragma unroll 1
    while (fewest < most) {
        const int tried = (fewest + most) / 2;
        int all = 0;
#pragma unroll
        for (int n = 0; n < EACH; n++) all += lengths[n] < 0 ? 0 : splits_of(lengths[n], tried);
        if (add_lanes(all) <= room) most = tried;
        else fewest = tried + 1;
    }
    int mine = 0;
#pragma unroll
    for (int n = 0; n < EACH; n++) mine += lengths[n] < 0 ? 0 : splits_of(lengths[n], fewest) * KVH;
    int before = 0;  // items of the lanes before this one
#pragma unroll 1
    for (int other = 0; other < 31; other++) {
        const int its = __shfl_sync(FULL, mine, other);
        before += other < lane.id ? its : 0;
    }
    const int all = add_lanes(mine);
#pragma unroll 1
    for (int n = 0; n < EACH; n++) {
        const int token = lane.id * EACH + n, length = lengths[n];
        if (length < 0) break;
        const int splits = splits_of(length, fewest);
        int which = before > block ? COUNT_OF(before - block, NB) : 0;  // the block's first item from `before` on
        for (int number = block + which * NB; number < before + splits * KVH; number += NB, which++) {
            const int head = (number - before) / splits, split = (number - before) % splits;
            const bool newest = length > 0 && split == splits - 1;
            const long long slot = newest ? a.slots[token] : -1;
            Item item;
            item.slot = slot < 0 ? -1 : slot / PAGE * a.cache_block + slot % PAGE * a.cache_token + head * a.cache_head;
            item.token = token, item.head = head, item.length = length, item.split = split, item.splits = splits;
            item.first = split * fewest, item.tiles = max(0, min(fewest, key_tiles(length) - item.first));
            item.newest = newest, item.number = number;
            items[which] = item;
        }
        before += splits * KVH;
    }
    return block < all ? COUNT_OF(all - block, NB) : 0;
}

// Where cached key `at` of a request's head is.
__device__ __forceinline__ long long place_of_key(const Arguments& a, const Item& item, int at) {
    const int block = a.table[item.token * a.table_row + at / PAGE];
    return block * a.cache_block + at % PAGE * a.cache_token + item.head * a.cache_head;
}
// Where key `row` of a tile is.
__device__ __forceinline__ long long place_of_row(const Lane& lane, const Arguments& a, const Item& item, int tile) {
    return place_of_key(a, item, min(tile * 8 + int(lane.row), item.length - 2));
}

// Asks for the keys and values of a layer before they are read. By one warp.
__device__ __forceinline__ void prefetch_keys(const Arguments& a, const Lane& lane, const Item* items, int count, int layer) {
    const u16* cache = (const u16*)a.caches[layer];
#pragma unroll 1
    for (int n = 0; n < count; n++) {
        const Item& item = items[n];
        const int keys = min(item.tiles * 8, item.length - 1 - item.first * 8);
#pragma unroll 2
        for (int key = lane.id; key < keys; key += 32) {
            const u16* place = cache + place_of_key(a, item, item.first * 8 + key);
#pragma unroll
            for (int line = 0; line < DIM / 64; line++) {
                prefetch(place + line * 64), prefetch(place + a.cache_value + line * 64);
            }
        }
    }
}

// One head of the new token by one warp: normed, turned, to shared memory and, if `cached` is not null, to the cache.
// part: 0 query, 1 key, 2 value. turn: [DIM] cosines, then sines.
__device__ __forceinline__ void load_head(
    const Lane& lane, const Arguments& a, int layer, const Item& item, int number, int part, const float* turn, u16* to,
    u16* cached
) {
    constexpr int FOURS = DIM / 8;  // of columns, in half a head
    const bool here = lane.id < FOURS;
    const int i = here ? lane.id * 4 : 0;
    const u64* from = (const u64*)(a.memory + IN_QKV + (u64(item.token) * QKV + number * DIM + i) * 2);
    const u64 some = load_relaxed(from), others = load_relaxed(from + DIM / 8);
    float x[4] = {low(u32(some)), high(u32(some)), low(u32(some >> 32)), high(u32(some >> 32))};
    float y[4] = {low(u32(others)), high(u32(others)), low(u32(others >> 32)), high(u32(others >> 32))};
#if QKNORM
    if (part < 2) {
        float square = 0.f;
#pragma unroll
        for (int n = 0; n < 4; n++) square += here ? x[n] * x[n] + y[n] * y[n] : 0.f;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) square += __shfl_xor_sync(FULL, square, d);
        const float factor = rsqrtf(square / DIM + EPSILON);
        const u16* weight = a.head_norms + (layer * 2 + part) * DIM + i;
#pragma unroll
        for (int n = 0; n < 4; n++) x[n] *= factor * plain(weight[n]), y[n] *= factor * plain(weight[n + DIM / 2]);
    }
#endif
    if (!here) return;
    if (part < 2) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float cosine = turn[i + n], sine = turn[i + n + DIM / 2], old = x[n];
            x[n] = old * cosine - y[n] * sine, y[n] = y[n] * cosine + old * sine;
        }
    }
    const uint2 first = make_uint2(pack(x[0], x[1]), pack(x[2], x[3])), second = make_uint2(pack(y[0], y[1]), pack(y[2], y[3]));
    *(uint2*)(to + i) = first, *(uint2*)(to + i + DIM / 2) = second;
    if (cached) *(uint2*)(cached + i) = first, *(uint2*)(cached + i + DIM / 2) = second;
}

// The new token's key and value, as the only one of a tile.
__device__ __forceinline__ void newest_key(Keys& keys, const Lane& lane, const u16* fresh) {
    const uint4 none = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int n = 0; n < DIM / 32; n++) keys.key[n] = lane.row == 0 ? *(const uint4*)(fresh + n * 32 + (lane.id & 3) * 8) : none;
#pragma unroll
    for (int n = 0; n < DIM / 64; n++) {
        keys.value[n][0] = (lane.id & 3) == 0 ? *(const uint4*)(fresh + DIM + n * 64 + lane.row * 8) : none;
        keys.value[n][1] = none;
    }
    keys.valid = 1;
}

// Four dimensions of a head's attention, before they are divided by the weight of all keys; best: the largest score.
struct Part {
    float4 x;
    float best, weight;

    __device__ __forceinline__ void add(const float4& other, float its_best, float its_weight) {
        const float both = fmaxf(best, its_best);
        const float mine = best == -INFINITY ? 0.f : exp2_fast(best - both);
        const float its = its_best == -INFINITY ? 0.f : exp2_fast(its_best - both);
        x.x = x.x * mine + other.x * its, x.y = x.y * mine + other.y * its;
        x.z = x.z * mine + other.z * its, x.w = x.w * mine + other.w * its;
        weight = weight * mine + its_weight * its, best = both;
    }
};

// Dimensions d to d + 3 of one of the item's heads, as the product by o reads them.
__device__ __forceinline__ void store_attended(const Arguments& a, const Item& item, int which, int d, const Part& part) {
    const float inverse = part.weight > 0.f ? __fdividef(1.f, part.weight) : 0.f;
    const float4 x = make_float4(part.x.x * inverse, part.x.y * inverse, part.x.z * inverse, part.x.w * inverse);
    const u32 place = place_in_fragments((item.head * GROUP_HEADS + which) * DIM + d, item.token);
    *(u64*)(a.memory + IN_ATTENDED + place) = pack_four(x);
}

// One item. sums: of the warps, SUMS_ATTENTION bytes; keys: of the warp's first tile.
__device__ __forceinline__ void attend(
    const Lane& lane, const Arguments& a, const Item& item, int layer, Keys& keys, const float* turn, char* shared, float* sums
) {
    u16* const cache = (u16*)a.caches[layer];
    long long place = place_of_row(lane, a, item, item.first + lane.warp + WARPS);  // of the warp's second tile
    u16 *queries = (u16*)(shared + AT_QUERY), *fresh = (u16*)(shared + AT_NEW);
    for (int n = lane.warp; n < GROUP_HEADS + 2; n += WARPS) {
        const int part = n < GROUP_HEADS ? 0 : n - GROUP_HEADS + 1;
        const int number = part == 0 ? item.head * GROUP_HEADS + n : QH + (part - 1) * KVH + item.head;
        u16* const to = part == 0 ? queries + n * (DIM + 8) : fresh + (part - 1) * DIM;
        u16* const cached = part > 0 && item.slot >= 0 ? cache + item.slot + (part - 1) * a.cache_value : nullptr;
        load_head(lane, a, layer, item, number, part, turn, to, cached);
    }
    sync_multipliers();
    uint4 query[DIM / 32];
#pragma unroll
    for (int n = 0; n < DIM / 32; n++)
        query[n] = lane.row < GROUP_HEADS ? *(const uint4*)(queries + lane.row * (DIM + 8) + n * 32 + (lane.id & 3) * 8)
                                        : make_uint4(0, 0, 0, 0);
    Attended found = {};
    found.best = -INFINITY;
    const int end = item.first + item.tiles;
#pragma unroll 1
    for (int tile = item.first + lane.warp; tile < end + item.newest; tile += WARPS) {  // number `end` is the newest key
        if (tile == end) newest_key(keys, lane, fresh);
        const int next = tile + WARPS;
        // The next keys are on their way while these scores and values are, and the place of those after them, too.
        attend_to(found, keys, query, lane, a.scale, [&] {
            if (next < end) read_key(keys, lane, cache, place);
        });
        if (next >= end) continue;
        read_values(keys, lane, a, cache, place);
        keys.valid = min(8, item.length - 1 - next * 8);
        place = place_of_row(lane, a, item, next + WARPS);
    }
    float* const stats = sums + WARPS * GROUP_HEADS * DIM;  // [WARPS][GROUP_HEADS][2]
    store_attended(found, lane, sums + lane.warp * GROUP_HEADS * DIM);
    if ((lane.id & 3) == 0 && lane.row < GROUP_HEADS) {
        stats[(lane.warp * GROUP_HEADS + lane.row) * 2] = found.best;
        stats[(lane.warp * GROUP_HEADS + lane.row) * 2 + 1] = found.weight;
    }
    sync_multipliers();
    float* const parts = (float*)(a.memory + IN_PARTS);
    float* const weights = (float*)(a.memory + IN_WEIGHTS);
#pragma unroll 1
    for (int n = lane.thread(); n < GROUP_HEADS * DIM / 4; n += MULTIPLIERS) {
        const int which = n / (DIM / 4), d = n % (DIM / 4) * 4;
        Part part = {make_float4(0.f, 0.f, 0.f, 0.f), -INFINITY, 0.f};
#pragma unroll 4
        for (int w = 0; w < WARPS; w++) part.best = fmaxf(part.best, stats[(w * GROUP_HEADS + which) * 2]);
#pragma unroll 4
        for (int w = 0; w < WARPS; w++) {
            const int head = w * GROUP_HEADS + which;
            const float best = stats[head * 2], share = best == -INFINITY ? 0.f : exp2_fast(best - part.best);
            const float4 x = *(const float4*)(sums + head * DIM + d);
            part.x.x += x.x * share, part.x.y += x.y * share, part.x.z += x.z * share, part.x.w += x.w * share;
            part.weight += stats[head * 2 + 1] * share;
        }
        if (item.splits == 1) {
            store_attended(a, item, which, d, part);
            continue;
        }
        const int head = item.number * GROUP_HEADS + which;
        *(float4*)(parts + head * DIM + d) = part.x;
        if (d == 0) weights[head * 2] = part.best, weights[head * 2 + 1] = part.weight;
    }
    if (item.splits == 1) return;
    // The last of the token's and head's items adds all of them up.
    int* const last = (int*)(shared + AT_LAST);
    sync_multipliers();
    if (threadIdx.x == 0) {
        u32* const arrived = (u32*)(a.memory + IN_ARRIVED) + item.token * KVH + item.head;
        *last = count_acquire_release(arrived, item.splits - 1) == u32(item.splits - 1);
    }
    sync_multipliers();
    if (!*last) return;
    const int first = item.number - item.split;  // items of a token and head follow each other
#pragma unroll 1
    for (int n = lane.thread(); n < GROUP_HEADS * DIM / 4; n += MULTIPLIERS) {
        const int which = n / (DIM / 4), d = n % (DIM / 4) * 4;
        Part part = {make_float4(0.f, 0.f, 0.f, 0.f), -INFINITY, 0.f};
#pragma unroll 4
        for (int split = 0; split < item.splits; split++) {
            const int head = (first + split) * GROUP_HEADS + which;
            const u64 stats = load_relaxed((const u64*)(weights + head * 2));
            const float4 x = load_relaxed((const float4*)(parts + head * DIM + d));
            part.add(x, __uint_as_float(u32(stats)), __uint_as_float(u32(stats >> 32)));
        }
        store_attended(a, item, which, d, part);
    }
}
