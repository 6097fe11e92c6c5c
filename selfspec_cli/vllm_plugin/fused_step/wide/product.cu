// ---- where activations lie ---------------------------------------------------------------------------------------
// A word of a record has four columns of a row, and the four that are 32 further on. Masked and shifted by 0, 8, 4 and 12
// bits it gives columns (0, 2), (1, 3), (32, 34) and (33, 35) as pairs, so a token's columns lie in this order: 16 bytes
// side by side. Lane (token % 8, pair) first multiplies columns 8 * pair to 8 * pair + 3 of both halves of a group, then
// the next four of both. This is the byte where columns `column` to `column` + 3 of a token begin, as four bf16 in the
// order 0, 2, 1, 3:
__device__ __forceinline__ u32 place_in_fragments(int column, int token) {
    const int group = column / 64, half = column / 32 % 2, pair = column / 8 % 4, four = column / 4 % 2;
    const int tile = (group * (TOKENS / 8) + token / 8) * 2 + four;
    return tile * 512 + (token % 8 * 4 + pair) * 16 + half * 8;
}
__device__ __forceinline__ u64 pack_four(const float4& x) { return u64(pack(x.y, x.w)) << 32 | pack(x.x, x.z); }
__device__ __forceinline__ float4 unpack_four(u64 four) {
    const u32 even = u32(four), odd = u32(four >> 32);
    return make_float4(low(even), low(odd), high(even), high(odd));
}

// ---- a warp's product --------------------------------------------------------------------------------------------
struct Sums {
    float of[TILES][TOKENS / 8][4];  // tile, eight tokens: rows `row` and `row + 8`, tokens 2 * pair and 2 * pair + 1 of each
};

// Eight weights of a row as bf16 pairs, in the order of `place_in_fragments`. Bits 0x43 before q + 8 are 136 + q, from
// which 136 is subtracted exactly. So the product with the scale is the only rounding. Low halves of bytes are q + 8
// already; for high halves the bit of 8 is flipped.
__device__ __forceinline__ void unpack_word(u32 word, u32 scale, u32 (&pairs)[4]) {
    const u32 mask = 0x000f000fu, low_magic = 0x43004300u, high_magic = 0x43084308u, offset = 0x43084308u;
    pairs[0] = multiply_pairs(subtract_pairs(mask_and_flip(word, mask, low_magic), offset), scale);
    pairs[1] = multiply_pairs(subtract_pairs(mask_and_flip(word >> 8, mask, low_magic), offset), scale);
    pairs[2] = multiply_pairs(subtract_pairs(mask_and_flip(word >> 4, mask, high_magic), offset), scale);
    pairs[3] = multiply_pairs(subtract_pairs(mask_and_flip(word >> 12, mask, high_magic), offset), scale);
}

// One group of columns: COUNT tiles, whose records are `stride` bytes apart, times all tokens.
template <int COUNT>
__device__ __forceinline__ void multiply_tiles(
    const char* records, int stride, const char* tokens, const Lane& lane, Sums& sums
) {
    constexpr int FOURS = TOKENS <= 16 ? 2 : 1;  // at once; both would need more registers than there are
#pragma unroll FOURS
    for (int four = 0; four < 2; four++) {  // of a lane's eight columns in either half of the group
        u32 w[COUNT][2][4];  // of rows `row` and `row + 8`
#pragma unroll
        for (int tile = 0; tile < COUNT; tile++) {
            const char* record = records + tile * stride;
            const uint2 words = *(const uint2*)(record + lane.id * 16 + four * 8);
            const u32 scales = *(const u32*)(record + 512 + lane.row * 4);
            const float above = half_to_float(scales & 0xffff), below = half_to_float(scales >> 16);
            unpack_word(words.x, pack(above, above), w[tile][0]);
            unpack_word(words.y, pack(below, below), w[tile][1]);
        }
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++) {
            const uint4 x = *(const uint4*)(tokens + (n * 2 + four) * 512 + lane.id * 16);
#pragma unroll
            for (int tile = 0; tile < COUNT; tile++) {
                float* sum = sums.of[tile][n];
                multiply_add(sum, w[tile][0][0], w[tile][1][0], w[tile][0][1], w[tile][1][1], x.x, x.y);
                multiply_add(sum, w[tile][0][2], w[tile][1][2], w[tile][0][3], w[tile][1][3], x.z, x.w);
            }
        }
    }
}

// The same for a number of tiles that is known at run time: each has code of its own, without a branch in it.
template <int COUNT>
__device__ __forceinline__ void multiply_group(
    int count, const char* records, int stride, const char* tokens, const Lane& lane, Sums& sums
) {
    if (count == COUNT) multiply_tiles<COUNT>(records, stride, tokens, lane, sums);
    else if constexpr (COUNT > 1) multiply_group<COUNT - 1>(count, records, stride, tokens, lane, sums);
}

// The warp's tiles times its groups of columns. One place in the kernel calls it, with one loop for all phases: code that
// is run once a layer waits for its instructions longer than for anything else.
__device__ __forceinline__ void product(
    Weights& weights, Inputs& inputs, const Lane& lane, const Work& work, const Role& role, Sums& sums
) {
    const int groups = work.groups.count, together = slabs_together(work);
    const int count = (work.tiles.count - role.row + work.row_groups - 1) / work.row_groups;
    const Strides strides = strides_of(work);
    int group = role.split, in_slot = 0;  // the warp's next group; slabs of the slot of weights before this one
    const char* records = nullptr;        // of the slot's first group and the warp's first tile
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums.of[tile][n][i] = 0.f;
#pragma unroll 1
    for (int first = 0; first < groups; first += SLAB) {
        if (in_slot == 0) records = weights.take() + role.row * strides.tile;
        const char* tokens = inputs.take();
#pragma unroll 1
        for (; group < min(first + SLAB, groups); group += work.splits) {
            const char* from = records + (in_slot * SLAB + group - first) * strides.group;
            const int stride = work.row_groups * strides.tile;
            multiply_group<TILES>(count, from, stride, tokens + (group - first) * GROUP_BYTES, lane, sums);
        }
        inputs.release(lane.id);
        if (++in_slot == together || first + SLAB >= groups) weights.release(lane.id), in_slot = 0;
    }
}

// The warp's sums of tokens 16 * pass to 16 * pass + 15 into sums [splits][tiles][16 tokens][SUM_ROW].
__device__ __forceinline__ void store_sums(
    float* to, int pass, const Lane& lane, const Work& work, const Role& role, const Sums& sums
) {
    const int tiles = work.tiles.count;
    float* const place = to + (role.split * tiles + role.row) * TILE_SUMS + (lane.id & 3) * 2 * SUM_ROW + lane.row;
#pragma unroll
    for (int some = 0; some < TOKENS / 16; some++) {
        if (some != pass) continue;  // registers have no index at run time
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            if (role.row + tile * work.row_groups >= tiles) break;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                float* at = place + tile * work.row_groups * TILE_SUMS + n * 8 * SUM_ROW;
                const float* sum = sums.of[tile][some * 2 + n];
                at[0] = sum[0], at[SUM_ROW] = sum[1], at[8] = sum[2], at[SUM_ROW + 8] = sum[3];
            }
        }
    }
}

// Rows `row` to `row` + 3 of a tile for one of 16 tokens, over all of the warps that share the columns.
__device__ __forceinline__ float4 add_splits(const float* sums, const Work& work, int tile, int token, int row) {
    const float* from = sums + tile * TILE_SUMS + token * SUM_ROW + row;
    const int step = work.tiles.count * TILE_SUMS;
    float4 all = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int n = 0; n < work.splits; n++, from += step) {
        const float4 some = *(const float4*)from;
        all.x += some.x, all.y += some.y, all.z += some.z, all.w += some.w;
    }
    return all;
}
