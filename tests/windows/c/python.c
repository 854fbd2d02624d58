// python.exe: python.org's own is not in the wheel that has its DLL.
#include <windows.h>

typedef int (*main_function)(int, wchar_t **);

int wmain(int argc, wchar_t **argv) {
  HMODULE dll = LoadLibraryW(L"python311.dll");
  if (!dll) return 101;
  main_function run = (main_function)(void *)GetProcAddress(dll, "Py_Main");
  return run ? run(argc, argv) : 102;
}
