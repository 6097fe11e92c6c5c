// Instructions that CUDA C++ has no name for, and small arithmetic. Both kernels begin with this file.
//
// tests/emulated/cuda.h defines the same functions for a CPU. All other files are free of inline PTX, so the tests run
// them as they are.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define FULL 0xffffffffu

#ifndef EMULATED
#define SHARED_MEMORY(name) extern __shared__ __align__(1024) char name[]
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// ---- arithmetic --------------------------------------------------------------------------------------------------
// Two bf16 in a word, the first in its low half.
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
// (word & mask) ^ flipped as one instruction: of two constants the compiler would make two.
__device__ __forceinline__ u32 mask_and_flip(u32 word, u32 mask, u32 flipped) {
    u32 bits;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(bits) : "r"(word), "r"(mask), "r"(flipped));
    return bits;
}
__device__ __forceinline__ u32 subtract_pairs(u32 a, u32 b) {
    u32 pair;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}
__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
    u32 pair;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The same number, of which the compiler knows nothing: what follows from it is not computed before the loop over layers,
// where it would need a register in all phases.
__device__ __forceinline__ int hidden_from_compiler(int number) {
    asm volatile("" : "+r"(number));
    return number;
}

// ---- tensor cores ------------------------------------------------------------------------------------------------
__device__ __forceinline__ void multiply(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}
// d = c + a * b, likewise of signed bytes.
__device__ __forceinline__ void multiply_add(int* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const int* c) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
// c += a * b for 16 rows, 8 columns and 16 products a sum, all in bf16 but the sums.
__device__ __forceinline__ void multiply_add(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same with 8 products a sum.
__device__ __forceinline__ void multiply_add(float* c, u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

// ---- memory of the whole grid ------------------------------------------------------------------------------------
__device__ __forceinline__ void load_relaxed(const u64* place, u64& a, u64& b) {
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(place) : "memory");
}
__device__ __forceinline__ u64 load_relaxed(const u64* place) {
    u64 a;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(a) : "l"(place) : "memory");
    return a;
}
__device__ __forceinline__ float4 load_relaxed(const float4* place) {
    float4 a;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(a.x), "=f"(a.y), "=f"(a.z), "=f"(a.w) : "l"(place) : "memory");
    return a;
}
__device__ __forceinline__ void store_relaxed(u64* place, u64 value) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(place), "l"(value) : "memory");
}
__device__ __forceinline__ u64 load_acquire(const u64* place) {
    u64 value;
    asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(place) : "memory");
    return value;
}
__device__ __forceinline__ void add_release(u64* place, u64 value) {
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(place), "l"(value) : "memory");
}
// Counts up to `last` and then from 0 again; what was there before.
__device__ __forceinline__ u32 count_acquire_release(u32* place, u32 last) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(place), "r"(last) : "memory");
    return before;
}
__device__ __forceinline__ void prefetch(const void* place) { asm volatile("prefetch.global.L2 [%0];" ::"l"(place)); }
__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// ---- copies into shared memory -----------------------------------------------------------------------------------
__device__ __forceinline__ u32 address(const void* place) { return u32(__cvta_generic_to_shared(place)); }
// L2 forgets first what is read so: every weight is read once a step.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copy_async(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy_async(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// Loads and stores that this thread knows to be done come before the asynchronous copies that it begins next. One fence for
// both memories would wait for all of the thread's stores, too.
__device__ __forceinline__ void fence_copies() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- barriers in shared memory: a phase ends with its last arrival, and after all bytes that it expects -----------
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_and_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
#ifdef PATIENCE  // explained below
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done = 0, tries = 0;
    while (!done) {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
        if (++tries > PATIENCE) __trap();
    }
}
#else
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\n"
        "bra AGAIN;\nDONE:\n}" ::"r"(barrier), "r"(parity) : "memory");
}
#endif
// Among THREADS_MEETING threads of the block, all of whole warps.
template <int NUMBER, int THREADS_MEETING>
__device__ __forceinline__ void synchronize() {
    asm volatile("barrier.sync.aligned %0, %1;" ::"n"(NUMBER), "n"(THREADS_MEETING) : "memory");
}
// Registers of each thread of a warpgroup, four warps, from here on. One gives back what the other takes.
template <int COUNT>
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
// For a thread that asks again and again: nothing on a GPU, whose other threads go on meanwhile.
__device__ __forceinline__ void let_others_run() {}
#endif  // EMULATED

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float plain(u16 value) { return __uint_as_float(u32(value) << 16); }

// With -DPATIENCE=N who waits in vain gives up after N tries, to find an error by.
#ifdef PATIENCE
#define TRY(n) if (++n > PATIENCE) __trap(); else let_others_run()
#else
#define TRY(n) let_others_run()
#endif
