/* A libcuda.so.1 of one imaginary sm_90 device that launches nothing.
 *
 * Triton's real driver and launcher call it, so a kernel goes all the way that it goes on a GPU, up to the launch. The
 * functions that begin with "stub_" are for the tests. Each function here returns 0, which is success. */
#include <stdint.h>
#include <string.h>

enum { MOST_LAUNCHES = 1 << 16, MOST_NAMES = 1 << 10, NAME_BYTES = 64 };
enum { MAX_SHARED_MEMORY = 8, WARP_SIZE = 10, NUM_MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76,
       SHARED_MEMORY_PER_MULTIPROCESSOR = 81, MAX_SHARED_MEMORY_OPTIN = 97 };
typedef struct { unsigned grid[3], block[3], shared_bytes; void *stream; void *attributes; unsigned num_attributes; } Config;
typedef struct { const char *name; unsigned grid[3], block, shared_bytes; } Launch;

static Launch launches[MOST_LAUNCHES];
static char names[MOST_NAMES][NAME_BYTES];
static int num_launches, num_modules, num_names, is_capturing;

int stub_num_launches(void) { return num_launches; }
int stub_num_modules(void) { return num_modules; }
const Launch *stub_launch(int index) { return &launches[index]; }
void stub_capture(int begins) { is_capturing = begins; }

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case MAX_SHARED_MEMORY: *value = 49152; break;
    case WARP_SIZE: *value = 32; break;
    case NUM_MULTIPROCESSORS: *value = 132; break;
    case MAJOR: *value = 9; break;
    case MINOR: *value = 0; break;
    case SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
    case MAX_SHARED_MEMORY_OPTIN: *value = 232448; break;
    default: *value = 1024;
    }
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the stub"; return 0; }

/* CUDA forbids a module to be loaded in a capture: error 900. */
int cuModuleLoadData(void **module, const void *image) {
    *module = (void *)1;
    num_modules++;
    return is_capturing ? 900 : 0;
}
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    if (num_names == MOST_NAMES) return 1;
    strncpy(names[num_names], name, NAME_BYTES - 1);
    *function = names[num_names++];
    return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuOccupancyMaxActiveClusters(int *count, void *function, void *config) { *count = 1; return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = is_capturing; return 0; }

/* Every pointer is one of the device's. */
int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) { *(uint64_t *)value = pointer; return 0; }
int cuPointerGetAttributes(unsigned count, int *attributes, void **values, uint64_t pointer) {
    for (unsigned i = 0; i < count; i++) *(uint64_t *)values[i] = pointer;
    return 0;
}

int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
    if (num_launches == MOST_LAUNCHES) return 1;
    Launch *launch = &launches[num_launches++];
    launch->name = function;
    memcpy(launch->grid, config->grid, sizeof launch->grid);
    launch->block = config->block[0];
    launch->shared_bytes = config->shared_bytes;
    return 0;
}
