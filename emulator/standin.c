/* Stand-in for the CUDA runtime entry points that the host code of an exported CuTe DSL unit calls. No GPU is touched:
 * a launch goes to a callback. Signatures follow the CUDA runtime API reference (cudaLaunchKernelExC, cudaLibraryLoadData,
 * cudaLibraryGetKernel, cudaFuncSetAttribute, cudaDeviceGetAttribute); the DSL's host code prefixes them with an underscore.
 * Their names here differ in the first letters: cute_host.py renames a unit's imports to these, so that they can resolve to nothing else. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { uint32_t x, y, z; } dim3_t;
typedef struct { dim3_t grid, block; size_t shared; void *stream; void *attributes; uint32_t count; } config_t;
typedef struct { const void *code; } library_t;
typedef struct { library_t *library; char *name; } kernel_t;
typedef int (*launch_fn)(const config_t *, const char *, void **);

static launch_fn callback;
static int major_cc = 9, minor_cc = 0, processors = 132, shared_optin = 232448;
enum { NO_DEVICE = 100, MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76, SHARED_OPTIN = 97 };

void standin_setup(launch_fn fn, int major, int minor, int sms, int shared) {
    callback = fn; major_cc = major; minor_cc = minor; processors = sms; shared_optin = shared;
}

int _emulLibraryLoadData(void **out, const void *code, void *a, void *b, unsigned na, void *c, void *d, unsigned nc) {
    library_t *l = malloc(sizeof *l);
    l->code = code;
    *out = l;
    return 0;
}
int _emulLibraryUnload(void *library) { free(library); return 0; }
int _emulLibraryGetKernel(void **out, void *library, const char *name) {
    kernel_t *k = malloc(sizeof *k);
    k->library = library;
    k->name = strdup(name);
    *out = k;
    return 0;
}
int _emKernelGetAttribute(int *value, int attribute, void *kernel, int device) { *value = 0; return 0; }
int _emulDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case MULTIPROCESSORS: *value = processors; break;
    case MAJOR: *value = major_cc; break;
    case MINOR: *value = minor_cc; break;
    case SHARED_OPTIN: *value = shared_optin; break;
    default: return 1; /* cudaErrorInvalidValue: nothing else is modelled */
    }
    return 0;
}
int _emulFuncSetAttribute(void *kernel, int attribute, int value) { return 0; }
int _emulKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }
int _emulGetDevice(int *device) { *device = 0; return 0; }
int _emulSetDevice(int device) { return device ? NO_DEVICE : 0; }
int _emulGetDeviceCount(int *count) { *count = 1; return 0; }
int _emulGetLastError(void) { return 0; }
int _emulStreamSynchronize(void *stream) { return 0; }
int _emulDeviceSynchronize(void) { return 0; }
int _emulLaunchKernelEx(const config_t *config, void *kernel, void **args) {
    return callback ? callback(config, ((kernel_t *)kernel)->name, args) : NO_DEVICE;
}

int emul_dialect_init_library_once(void **library, int (*init)(void **), int (*load)(void **, int),
                                   void (*error)(const char *, const char *)) {
    void *l = 0;
    if (*library) return 0;
    if (init(&l) || (load && load(&l, 0))) { error("RuntimeError", "the stand-in runtime could not load the module"); return -1; }
    *library = l;
    return 0;
}
void emul_dialect_unload_library_once(void **library) { if (*library) { free(*library); *library = 0; } }
void EmulDSLRT_TVMFFISetRaisedCudaError(void (*set)(const char *, const char **, int), int error) {
    static const char *parts[] = {"the emulated launch failed"};
    set("RuntimeError", parts, 1);
}
void EmulDSLRT_TVMFFISetRaisedCudaLaunchError(void (*set)(const char *, const char **, int), int error) {
    EmulDSLRT_TVMFFISetRaisedCudaError(set, error);
}
