#include "status.h"

#include <cstring>

namespace kvcached {

Status system_failure(const char* what, int error) {
  return failure(Code::system_call, std::string(what) + ": " + strerror(error) + " (errno " +
                                        std::to_string(error) + ")");
}

}  // namespace kvcached
