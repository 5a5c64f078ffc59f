// A double of torch's header for tests/pager/threads_stress.cpp: the pager's key.
#pragma once

namespace c10 {

enum class DispatchKey { Fake };

}  // namespace c10
