// The stamp of _C_cuda; library.cpp has that of _C.
#include "module/stamp.h"
