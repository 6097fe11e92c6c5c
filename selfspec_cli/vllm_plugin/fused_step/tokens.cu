// ---- tokens as bytes -------------------------------------------------------------------------------------------
// Factor of products of the 32 columns from `column` on, whose largest value `most` was rounded to 127. Weights of the
// second half of a group are multiplied as 16 times themselves.
__device__ __forceinline__ float factor_of(float most, int column) {
    return most * (column % 64 < 32 ? 1.f / 127.f : 1.f / (127.f * 16.f));
}

// Items `start` to start + N - 1: item n is 128 columns of token n / MOST, four in each lane, as far as they exist.
template <int MOST, int N>
__device__ __forceinline__ void quantize_items(const Lane& lane, const float (&x)[N][4], int start, int groups) {
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
        int token = (start + n) / MOST, column = (start + n) % MOST * 128 + lane.id * 4;
        if (token < NT && column < groups * 64) {
            int place = column / 64 * EVEN_NT + token, c = column % 64;
            *(u32*)(lane.bytes + place * 64 + (c % 32) / 8 * 16 + c / 32 * 8 + c % 8) = word;
            if ((lane.id & 7) == 0) *(float*)(lane.factors + place * 8 + c / 32 * 4) = factor_of(most[n], c);
        }
    }
}

template <int COLUMNS>
constexpr int ITEMS_OF = ((COLUMNS / 64 + WARPS - 1) / WARPS + 1) / 2;  // of a token, for one warp

// A norm's weights for the warp's columns, four in each lane for every item.
struct NormWeights {
    uint2 of[ITEMS_OF<HIDDEN>];
    __device__ __forceinline__ void read(const Lane& lane, const u16* weight, Share share) {
#pragma unroll
        for (int n = 0; n < ITEMS_OF<HIDDEN>; n++) {
            int column = n * 128 + lane.id * 4;
            of[n] = column < share.groups * 64 ? *(const uint2*)(weight + share.begin * 64 + column) : make_uint2(0, 0);
        }
    }
};

// A sum over the warp for each of N tokens, by halving the tokens that a lane adds up: lane 0 of those that share a
// token's sum writes it to sums[token][WARPS].
template <int N>
__device__ __forceinline__ void add_over_lanes(const Lane& lane, const float (&parts)[N], float* sums) {
    constexpr int ALL = N <= 1 ? 1 : N <= 2 ? 2 : N <= 4 ? 4 : 8;
    static_assert(N <= 8, "more tokens than are halved here");
    float part[ALL];
#pragma unroll
    for (int n = 0; n < ALL; n++) part[n] = n < N ? parts[n < N ? n : 0] : 0.f;
    u32 token = 0;
#pragma unroll
    for (int step = 0; step < 5; step++) {
        const u32 distance = 16 >> step;
        const int half = ALL >> (step + 1);
        const bool upper = half > 0 && (lane.id & distance);
        if (half == 0) part[0] += __shfl_xor_sync(FULL, part[0], distance);
#pragma unroll
        for (int n = 0; n < half; n++) {
            float mine = upper ? part[n + half] : part[n], other = upper ? part[n] : part[n + half];
            part[n] = mine + __shfl_xor_sync(FULL, other, distance);
        }
        token += upper ? half : 0;
    }
    if (lane.id % (32 / ALL) == 0 && token < N) sums[token * WARPS + lane.warp] = part[0];
}

// Tokens [NT][COLUMNS / 2] of other blocks, the warp's groups of them, as bytes. NORM: times the norm's weights, and
// sums of squares to squares [NT][WARPS].
template <int COLUMNS, bool NORM>
__device__ __forceinline__ void load_and_quantize(
    const Lane& lane, const u64* words, u32 flag, const NormWeights& norm_weights, Share share, float* squares
) {
    constexpr int MOST = ITEMS_OF<COLUMNS>, ITEMS = MOST * NT;
    constexpr int BATCH = ITEMS < 12 ? ITEMS : 12;
    const int begin = share.begin, groups = share.groups;
    float square[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) square[n] = 0.f;
    __syncwarp();  // the bytes of the phase before have been read
#pragma unroll
    for (int start = 0; start < ITEMS; start += BATCH) {
        Pair found[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            int item = start + n, token = item / MOST, column = item % MOST * 128 + lane.id * 4;
            bool here = item < ITEMS && column < groups * 64;
            found[n] = Pair{0, flag, 0, flag};
            if (here) found[n] = load_pair(words + (token * COLUMNS + begin * 64 + column) / 2);
        }
        bool all = false;
        [[maybe_unused]] u32 tries = 0;
        while (!all) {
            TRY(tries);
            all = true;
#pragma unroll
            for (int n = 0; n < BATCH; n++) {
                int item = start + n, token = item / MOST, column = item % MOST * 128 + lane.id * 4;
                if (!found[n].ready(flag)) {
                    found[n] = load_pair(words + (token * COLUMNS + begin * 64 + column) / 2);
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
                const uint2 weight = norm_weights.of[NORM ? (start + n) % MOST : 0];
                x[n][0] *= low(weight.x), x[n][1] *= high(weight.x), x[n][2] *= low(weight.y), x[n][3] *= high(weight.y);
            }
        }
        quantize_items<MOST, BATCH>(lane, x, start, groups);
    }
    if (NORM) add_over_lanes(lane, square, squares);
    __syncwarp();
}

// What comes before down, which is bytes already, with its factors: the warp's groups. All words of some tokens are
// asked for at once, since each answer takes as long as the whole product.
__device__ __forceinline__ void load_quantized(const Lane& lane, const Arguments& a, u32 flag, Share share) {
    constexpr int GROUPS = (GROUPS_I + WARPS - 1) / WARPS, ITEMS = (GROUPS + 3) / 4;  // of 256 columns
    constexpr int FACTORS = (GROUPS * 2 + 31) / 32;                                  // words in a lane
    constexpr int TOGETHER = ITEMS * NT <= 12 ? NT : 12 / ITEMS > 0 ? 12 / ITEMS : 1;  // tokens
    const int begin = share.begin, groups = share.groups;
    __syncwarp();  // the bytes of the phase before have been read
#pragma unroll 1
    for (int first = 0; first < NT; first += TOGETHER) {
        Pair bytes[TOGETHER][ITEMS];
        u64 factor[TOGETHER][FACTORS];
        const u64* words = a.words + PK_GATED + first * (INTER / 4) + begin * 16 + lane.id * 2;
        const u64* factors = a.words + PK_FACTOR + first * (INTER / 32) + begin * 2 + lane.id;
#pragma unroll
        for (int t = 0; t < TOGETHER; t++) {
            const bool some = NT % TOGETHER == 0 || first + t < NT;
#pragma unroll
            for (int n = 0; n < ITEMS; n++) {
                bytes[t][n] = Pair{0, flag, 0, flag};
                if (some && n * 256 + lane.id * 8 < groups * 64) bytes[t][n] = load_pair(words + t * (INTER / 4) + n * 64);
            }
#pragma unroll
            for (int n = 0; n < FACTORS; n++) {
                factor[t][n] = u64(flag) << 32;
                if (some && n * 32 + lane.id < groups * 2) factor[t][n] = load_relaxed(factors + t * (INTER / 32) + n * 32);
            }
        }
        bool all = false;
        [[maybe_unused]] u32 tries = 0;
        while (!all) {
            TRY(tries);
            all = true;
#pragma unroll
            for (int t = 0; t < TOGETHER; t++) {
#pragma unroll
                for (int n = 0; n < ITEMS; n++)
                    if (!bytes[t][n].ready(flag)) bytes[t][n] = load_pair(words + t * (INTER / 4) + n * 64), all = false;
#pragma unroll
                for (int n = 0; n < FACTORS; n++)
                    if (u32(factor[t][n] >> 32) != flag)
                        factor[t][n] = load_relaxed(factors + t * (INTER / 32) + n * 32), all = false;
            }
        }
        __syncwarp();
#pragma unroll
        for (int t = 0; t < TOGETHER; t++) {
            const bool some = NT % TOGETHER == 0 || first + t < NT;
#pragma unroll
            for (int n = 0; n < ITEMS; n++) {
                int column = n * 256 + lane.id * 8, c = column % 64;
                char* to = lane.bytes + (column / 64 * EVEN_NT + first + t) * 64 + c % 32 / 8 * 16 + c / 32 * 8;
                if (some && column < groups * 64) *(uint2*)to = make_uint2(bytes[t][n].a, bytes[t][n].b);
            }
#pragma unroll
            for (int n = 0; n < FACTORS; n++) {
                int half = n * 32 + lane.id;
                if (some && half < groups * 2)
                    *(u32*)(lane.factors + (half / 2 * EVEN_NT + first + t) * 8 + half % 2 * 4) = u32(factor[t][n]);
            }
        }
    }
    __syncwarp();
}
