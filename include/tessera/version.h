/* Tessera's version, here and nowhere else: CMake and the Python package read it from these lines.
 */
#ifndef TESSERA_VERSION_H_
#define TESSERA_VERSION_H_

/** Grows with changes that break callers; 0: minor does. */
#define TESSERA_VERSION_MAJOR 0
/** Grows with additions. */
#define TESSERA_VERSION_MINOR 1
/** Grows with corrections. */
#define TESSERA_VERSION_PATCH 0

#endif /* TESSERA_VERSION_H_ */
