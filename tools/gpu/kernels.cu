// The kernels of driver_calls.cpp, which embeds their PTX text and says how the text is made.

// Does nothing. It measures the cost of a launch.
extern "C" __global__ void empty_kernel() {}

// Runs for `nanoseconds` of the device's global timer. Each thread owns one word of `data`, `stride` words after its
// neighbour's, and advances it by one step of a linear congruential generator per round: load, multiply, add, store. At
// its end it writes the number of rounds and the last value to `results`. The host computes the value that the number
// of rounds must give, so a lost, repeated or misplaced access is seen.
extern "C" __global__ void spin_kernel(unsigned* data, unsigned stride, unsigned* results,
                                       unsigned long long nanoseconds) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  volatile unsigned* word = data + (unsigned long long)thread * stride;
  unsigned long long begun, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
  unsigned rounds = 0;
  do {
    *word = *word * 1664525u + 1013904223u;
    ++rounds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begun < nanoseconds);
  results[2 * thread] = rounds;
  results[2 * thread + 1] = *word;
}

// Adds `value` to the words of `count` vectors of four, `rounds` times: it streams the buffer through the memory.
extern "C" __global__ void add_kernel(uint4* data, unsigned long long count, unsigned value, unsigned rounds) {
  const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned round = 0; round < rounds; ++round) {
    for (unsigned long long at = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; at < count; at += stride) {
      uint4 four = data[at];
      four.x += value;
      four.y += value;
      four.z += value;
      four.w += value;
      data[at] = four;
    }
  }
}
