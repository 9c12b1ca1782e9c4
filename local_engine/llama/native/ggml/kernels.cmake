# Links Updraft's AVX-512 kernels into llama.cpp's libggml-cpu, in place of ggml's own functions.
#
# CMake includes this file in ggml's project() call (-DCMAKE_PROJECT_ggml_INCLUDE=...). The targets do not exist yet, so
# the work is deferred to the end of ggml's CMakeLists.txt. If the kernels do not fit, llama.cpp is built without them.

set(UPDRAFT_WRAPPED llamafile_sgemm ggml_compute_forward_mul_mat_tiled ggml_compute_forward_flash_attn_ext)
# Compiler flags of all sources; the rest of llama.cpp keeps its own flags.
set(UPDRAFT_FLAGS -std=gnu11 -O3 -fPIC -fvisibility=hidden -fno-lto -fno-math-errno -fno-trapping-math)
set(UPDRAFT_AVX512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c -mprefer-vector-width=512)

# Sets `reason` to the reason why the kernels cannot be linked in; empty if they can.
function(updraft_obstacle reason)
    set(${reason} "" PARENT_SCOPE)
    if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$"
       OR NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
        set(${reason} "they are for Linux on x86-64" PARENT_SCOPE)
        return()
    endif()
    if(NOT CMAKE_C_COMPILER_ID MATCHES "GNU|Clang")
        set(${reason} "they need GCC or Clang" PARENT_SCOPE)
        return()
    endif()
    if(NOT TARGET ggml-cpu)
        set(${reason} "this build has no target ggml-cpu" PARENT_SCOPE)
        return()
    endif()
    get_target_property(type ggml-cpu TYPE)
    if(NOT type MATCHES "SHARED_LIBRARY|MODULE_LIBRARY")
        set(${reason} "ggml-cpu is not a shared library in this build" PARENT_SCOPE)
        return()
    endif()
    if(NOT GGML_LLAMAFILE)
        set(${reason} "GGML_LLAMAFILE is off" PARENT_SCOPE)
    endif()
endfunction()

# Sets `fits` to whether the sources compile against this llama.cpp's headers, and `log` to the compiler's output.
function(updraft_try fits log)
    set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
    set(headers ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/src/ggml-cpu)
    try_compile(UPDRAFT_KERNELS_FIT ${CMAKE_BINARY_DIR}/updraft-kernels SOURCES ${ARGN}
        COMPILE_DEFINITIONS ${UPDRAFT_FLAGS} ${UPDRAFT_AVX512} -w
        CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${headers}"
        OUTPUT_VARIABLE said)
    set(${fits} ${UPDRAFT_KERNELS_FIT} PARENT_SCOPE)
    set(${log} "${said}" PARENT_SCOPE)
    unset(UPDRAFT_KERNELS_FIT CACHE)
endfunction()

function(updraft_link_kernels)
    updraft_obstacle(obstacle)
    if(obstacle)
        message(STATUS "Updraft: llama.cpp is built without Updraft's kernels: ${obstacle}.")
        return()
    endif()
    include(CheckLinkerFlag)
    check_linker_flag(C "-Wl,--wrap=updraft_none" UPDRAFT_LINKER_WRAPS)
    file(GLOB sources ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/*.c)
    updraft_try(fits log ${sources})
    if(NOT fits OR NOT UPDRAFT_LINKER_WRAPS)
        message(WARNING "Updraft: llama.cpp is built without Updraft's AVX-512 kernels. They do not fit this compiler, "
            "linker or version of llama.cpp. llama.cpp works with its own kernels, which are slower.\n${log}")
        return()
    endif()
    message(STATUS "Updraft: AVX-512 kernels are linked into ggml-cpu")
    target_sources(ggml-cpu PRIVATE ${sources})
    foreach(source ${sources})
        get_filename_component(name ${source} NAME)
        if(name STREQUAL "wrapped.c") # this file runs on every processor
            set(flags ${UPDRAFT_FLAGS})
        else()
            set(flags ${UPDRAFT_FLAGS} ${UPDRAFT_AVX512})
        endif()
        set_source_files_properties(${source} TARGET_DIRECTORY ggml-cpu PROPERTIES COMPILE_OPTIONS "${flags}")
    endforeach()
    foreach(name ${UPDRAFT_WRAPPED})
        target_link_options(ggml-cpu PRIVATE "LINKER:--wrap=${name}")
    endforeach()
endfunction()

cmake_language(DEFER CALL updraft_link_kernels)
