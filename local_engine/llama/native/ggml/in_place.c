/* Functions in the place of those that a library calls by name: of this library alone, wherever else the name is used.

   The linker has left a slot for each function that may come from elsewhere, and writes into it whose it is. */

#define _GNU_SOURCE
#include "types.h"

#if defined(__linux__) && defined(__x86_64__)
#include <dlfcn.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
    const struct link_map *library;
    const ElfW(Sym) *symbols;
    const char *names;
    const ElfW(Rela) *slots;
    size_t count;
} Calls;

static bool calls_of(void *library, Calls *calls) {
    struct link_map *map;
    size_t bytes = 0;
    if (dlinfo(library, RTLD_DI_LINKMAP, &map)) return false;
    *calls = (Calls){.library = map};
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        /* glibc has added where the library lies, other C libraries have not. */
        ElfW(Addr) at = entry->d_un.d_ptr < map->l_addr ? map->l_addr + entry->d_un.d_ptr : entry->d_un.d_ptr;
        if (entry->d_tag == DT_SYMTAB) calls->symbols = (const void *)at;
        if (entry->d_tag == DT_STRTAB) calls->names = (const void *)at;
        if (entry->d_tag == DT_JMPREL) calls->slots = (const void *)at;
        if (entry->d_tag == DT_PLTRELSZ) bytes = entry->d_un.d_val;
    }
    calls->count = bytes / sizeof(ElfW(Rela));
    return calls->symbols && calls->names && calls->slots;
}

/* Whether the slot is in pages that were made read-only once the linker had written them: whole ones, as glibc seals. */
typedef struct {
    ElfW(Addr) library, slot, page;
    bool found;
} Sealed;

static int look_at(struct dl_phdr_info *info, size_t size, void *of) {
    Sealed *sealed = of;
    (void)size;
    if (info->dlpi_addr != sealed->library) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        ElfW(Addr) from = info->dlpi_addr + part->p_vaddr;
        ElfW(Addr) end = (from + part->p_memsz) & ~(sealed->page - 1);
        if (part->p_type == PT_GNU_RELRO && from <= sealed->slot && sealed->slot < end)
            sealed->found = true;
    }
    return 1;
}

static bool write_slot(ElfW(Addr) library, void **slot, void *function) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    Sealed sealed = {.library = library, .slot = (ElfW(Addr))slot, .page = page};
    void *start = (void *)((uintptr_t)slot & ~(page - 1));
    dl_iterate_phdr(look_at, &sealed);
    if (sealed.found && mprotect(start, page, PROT_READ | PROT_WRITE)) return false;
    *slot = function;
    return !sealed.found || !mprotect(start, page, PROT_READ);
}

/* From now on `function` is what `library`, a handle of the linker's, calls when it calls `name`. False: it never
   does, or its slot cannot be written. */
EXPORT bool updraft_put_in_place(void *library, const char *name, void *function) {
    Calls calls;
    if (!calls_of(library, &calls)) return false;
    for (size_t i = 0; i < calls.count; i++) {
        const ElfW(Sym) *symbol = &calls.symbols[ELF64_R_SYM(calls.slots[i].r_info)];
        if (ELF64_R_TYPE(calls.slots[i].r_info) == R_X86_64_JUMP_SLOT && !strcmp(calls.names + symbol->st_name, name))
            return write_slot(calls.library->l_addr, (void **)(calls.library->l_addr + calls.slots[i].r_offset), function);
    }
    return false;
}
#else
EXPORT bool updraft_put_in_place(void *library, const char *name, void *function) {
    (void)library, (void)name, (void)function;
    return false;
}
#endif
