// Checks of problems: `EQQ_CHECK(condition, ...)` returns a sentence, as `printf` writes it to `text`, if it fails.
#pragma once

#include <stddef.h>
#include <stdio.h>

#define EQQ_CHECK(CONDITION, ...)      \
  if (!(CONDITION)) {                  \
    snprintf(text, room, __VA_ARGS__); \
    return text;                       \
  }
