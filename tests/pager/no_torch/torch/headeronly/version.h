// A double of torch's header for tests/pager/threads_stress.cpp: the newest way to count references.
#pragma once
#define TORCH_VERSION_MAJOR 2
#define TORCH_VERSION_MINOR 13
