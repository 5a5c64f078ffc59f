// One translation unit: torch's headers are read once.
#include "cells.cpp"
#include "recorder.cpp"
#include "vault.cpp"
