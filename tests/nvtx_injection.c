// A minimal NVTX tool: writes each domain, push and pop to the file named by NVTX_LINES.
// Layouts and numbers are those of NVTX 3, whose headers are not needed.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef void (*Function)(void);
typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    int64_t payload;
    int32_t message_type;
    const void* message;  // a registered string: what register_string gave
} Attributes;
typedef struct {
    size_t size;
    int (*get_module)(int module, Function*** table, unsigned* size);
} Callbacks;

enum { CALLBACKS = 1, CORE2 = 5, PUSH = 4, POP = 5, REGISTER = 10, CREATE = 12 };

static FILE* lines;

static const void* create_domain(const char* name) {
    fprintf(lines, "domain %s\n", name);
    return name;
}
static const void* register_string(const void* domain, const char* text) {
    char* kept = malloc(64);
    snprintf(kept, 64, "%s", text);
    return kept;
}
static int push(const char* domain, const Attributes* event) {
    fprintf(lines, "push %s %lld %08x %d\n", (const char*)event->message, (long long)event->payload,
            event->color, event->payload_type);
    return 0;
}
static int pop(const char* domain) {
    fprintf(lines, "pop\n");
    fflush(lines);
    return 0;
}

int InitializeInjectionNvtx2(const void* (*get_table)(uint32_t)) {
    const Callbacks* callbacks = get_table(CALLBACKS);
    Function** table;
    unsigned size = 0;
    if (!callbacks || !callbacks->get_module(CORE2, &table, &size)) return 0;
    const char* path = getenv("NVTX_LINES");
    if (!path || !(lines = fopen(path, "w"))) return 0;
    *table[CREATE] = (Function)create_domain;
    *table[REGISTER] = (Function)register_string;
    *table[PUSH] = (Function)push;
    *table[POP] = (Function)pop;
    return 1;
}
