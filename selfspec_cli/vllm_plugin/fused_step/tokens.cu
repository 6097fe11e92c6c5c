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
