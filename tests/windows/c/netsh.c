// netsh.exe: sends its arguments to tests/windows/netsh.py, prints the answer, returns its status.
// Wine's own netsh.exe does nothing.
#include <winsock2.h>
#include <windows.h>
#include <stdio.h>

static int talk(SOCKET server, int argc, wchar_t **argv) {
  for (int i = 1; i < argc; i++) {
    char text[1024];
    int size = WideCharToMultiByte(CP_UTF8, 0, argv[i], -1, text, sizeof text, 0, 0);
    if (send(server, text, size, 0) != size) return 98;  // with the final zero
  }
  shutdown(server, SD_SEND);
  unsigned char status;
  if (recv(server, (char *)&status, 1, 0) != 1) return 98;
  char buffer[65536];
  DWORD written;
  for (int size; (size = recv(server, buffer, sizeof buffer, 0)) > 0;)
    WriteFile(GetStdHandle(STD_OUTPUT_HANDLE), buffer, size, &written, 0);
  return status;
}

int wmain(int argc, wchar_t **argv) {
  WSADATA data;
  WSAStartup(MAKEWORD(2, 2), &data);
  SOCKET server = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(7777)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(server, (struct sockaddr *)&address, sizeof address)) {
    printf("no server: %d\n", WSAGetLastError());
    return 99;
  }
  return talk(server, argc, argv);
}
