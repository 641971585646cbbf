#ifndef DLX_HOT_H_
#define DLX_HOT_H_

/* Every conversion goes through these. The linker lays them side by side, whichever file they are
 * in, so that their times do not change with what is added elsewhere. */
#define DLX_HOT __attribute__((hot))

#endif
