// One translation unit: torch's headers are read once.
// clang-format off
#include "cells.cpp"
#include "cell_types.cpp"
#include "ledger.cpp"
#include "traffic.cpp"
#include "recorder.cpp"
#include "saved.cpp"
#include "module.cpp"
#include "window.cpp"
#include "vault.cpp"
#include "vault_api.cpp"
#include "watch.cpp"
#include "trace.cpp"
