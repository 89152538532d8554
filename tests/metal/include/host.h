// The command-line program around a kernel: buffers from a file, and back into one.
//
// The file holds unsigned 32-bit numbers: grid and threadgroup (3 each), the order of threads, the
// number of buffers; for each buffer its bytes, the kernel's offset into it, and whether it is an
// output. Then the buffers' bytes, one behind the other; the outputs' are written to the second
// file. Each buffer is allocated by itself, so the address sanitiser knows where it ends.
#pragma once

#include <cstdint>
#include <cstdio>
#include <vector>

#include "gpu.h"

namespace gpu {

inline void transfer(size_t done, size_t wanted) {
  if (done != wanted) {
    std::fprintf(stderr, "the file of buffers is cut short\n");
    std::_Exit(4);
  }
}

inline int serve(int argc, char** argv, void (*kernel)(char** buffers)) {
  std::FILE* in = std::fopen(argv[1], "rb");
  uint32_t head[8];
  transfer(std::fread(head, sizeof head, 1, in), 1);
  std::vector<uint32_t> layout(3 * head[7]);
  transfer(std::fread(layout.data(), 4, layout.size(), in), layout.size());
  std::vector<char*> buffers, arguments;
  for (size_t i = 0; i < head[7]; i++) {
    buffers.push_back(static_cast<char*>(std::malloc(layout[3 * i])));
    arguments.push_back(buffers[i] + layout[3 * i + 1]);
    transfer(std::fread(buffers[i], 1, layout[3 * i], in), layout[3 * i]);
  }
  std::fclose(in);
  const Size grid{head[0], head[1], head[2]}, threadgroup{head[3], head[4], head[5]};
  group.kernel = kernel, group.buffers = arguments.data();
  dispatch(grid, threadgroup, head[6]);
  std::FILE* out = std::fopen(argv[2], "wb");
  for (size_t i = 0; i < head[7]; i++)
    if (layout[3 * i + 2]) transfer(std::fwrite(buffers[i], 1, layout[3 * i], out), layout[3 * i]);
  std::fclose(out);
  return argc == 3 ? 0 : 4;
}

}  // namespace gpu
