// The source lines of the program that call ops, for reports. A line is looked up only where a report asks for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/constants.h"

namespace memmgr::pager {

extern std::atomic<Lines> lines_taken;

// Returns the number of the line at which this thread's innermost Python function is, without the functions of skipped
// folders. 0: the thread runs a backward, or no function of Python. Takes the GIL. The caller holds no lock.
uint32_t line_of_caller();

struct SourceLine {
  std::string file, function;
  int line;
  uint32_t caller;  // of a library's line: the number of the innermost line of the program; 0: none
};
// These functions need the GIL.
const std::vector<SourceLine>& source_lines();  // by number; the first one stands for a line that is not known
void skip_folders(std::vector<std::string> folders, std::vector<std::string> libraries);
void forget_codes();  // releases the code objects; the lines stay known

}  // namespace memmgr::pager
