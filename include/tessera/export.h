// Which symbols leave the shared library: everything else is compiled with hidden visibility.
#pragma once

#if defined(_WIN32)
#define TESSERA_API
#else
#define TESSERA_API __attribute__((visibility("default")))
#endif
